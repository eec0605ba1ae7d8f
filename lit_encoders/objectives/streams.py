"""Mask streams: documents of one batch masked at different ratios, each with a share of the documents and a head.

Source: UltraBERT (Park, Lee, Kang 2026): four sequences masked at 5 % to one at 50 %, an LM head per ratio. The paper
does not say how losses are aggregated, so each way that it may have meant is an option here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

Aggregation = Literal["tokens", "streams", "inputs"]
SharesOf = Literal["documents", "tokens"]


@dataclass(frozen=True)
class MaskStream:
    """Documents that are masked at one ratio.

    Attributes:
        name: in logs and records.
        mask_ratio: share of eligible tokens that are targets, in (0, 1].
        share: of the documents (or tokens), in (0, 1]; the shares of all streams sum to 1.
        weight: of its losses, above 0.
        distill: whether a teacher's distribution is learnt on its targets too.
        head: name of its LM head; streams that name one head share it, None is the model's own.
    """

    name: str
    mask_ratio: float
    share: float
    weight: float = 1.0
    distill: bool = False
    head: str | None = None


def check_streams(streams: Sequence[MaskStream]) -> None:
    """Refuse streams that make no sense together.

    Raises:
        ValueError: a value out of its range, a name twice, or shares that do not sum to 1.
    """
    for stream in streams:
        key = f"model.streams {stream.name!r}"
        if not stream.name or "/" in stream.name:
            raise ValueError(f"model.streams must have names without '/', got {stream.name!r}")
        if stream.head is not None and not re.fullmatch(r"[\w-]+", stream.head):
            raise ValueError(f"{key}: head must be named in letters, digits, '_' and '-', got {stream.head!r}")
        if not 0 < stream.mask_ratio <= 1:
            raise ValueError(f"{key}: mask_ratio must be in (0, 1], got {stream.mask_ratio}")
        if not 0 < stream.share <= 1:
            raise ValueError(f"{key}: share must be in (0, 1], got {stream.share}")
        if not (stream.weight > 0 and math.isfinite(stream.weight)):
            raise ValueError(f"{key}: weight must be above 0, got {stream.weight}")
    names = [stream.name for stream in streams]
    if len(set(names)) < len(names):
        raise ValueError(f"model.streams must have names of their own, got {', '.join(names)}")
    total = sum(stream.share for stream in streams)
    if not math.isclose(total, 1.0, abs_tol=1e-6):
        raise ValueError(f"model.streams must have shares that sum to 1, got {total:g}")


def check_documents(streams: Sequence[MaskStream], documents: float) -> None:
    """Refuse streams that most optimizer steps would have no document for.

    Args:
        streams: of the run.
        documents: pieces of documents in an optimizer step, on average.

    Raises:
        ValueError: a stream's part of them is less than one.
    """
    for stream in streams:
        # Shares such as 0.1 of 10 documents lie a hair below the integer they mean.
        if round(stream.share * documents, 6) < 1:
            raise ValueError(
                f"model.streams {stream.name!r} must get at least one document per optimizer step: raise data.slots, "
                f"trainer.accumulate_grad_batches or its share, got {stream.share:g} of {documents:.1f} documents"
            )


def main_head(streams: Sequence[MaskStream]) -> str | None:
    """The streams' head that is the model's own, and so is exported: the first distilled, else the first.

    None where a stream names no head, and so has the model's own itself.

    >>> main_head([MaskStream("narrow", 0.05, 0.8, head="a"), MaskStream("wide", 0.5, 0.2, distill=True, head="b")])
    'b'
    """
    heads = [s.head for s in streams if s.distill] + [s.head for s in streams]
    return heads[0] if heads and None not in heads else None


@cache
def stream_pattern(shares: tuple[float, ...]) -> IntArray:
    """Deal out streams as evenly as whole numbers allow: one period of the endless pattern, (P,).

    At each place comes the stream that is furthest behind its share, the first of equals.

    Args:
        shares: of each stream; they sum to 1, and are read as fractions of at most 1,000, or in thousandths where the
            pattern of those would be longer than 10,000.

    >>> stream_pattern((0.8, 0.2)).tolist()
    [0, 0, 1, 0, 0]
    """
    exact = [Fraction(share).limit_denominator(1000) for share in shares]
    if math.lcm(*(share.denominator for share in exact)) > 10_000:
        exact = [Fraction(max(1, round(1000 * share)), 1000) for share in shares]
    exact[0] += 1 - sum(exact)
    period = math.lcm(*(share.denominator for share in exact))
    pattern, behind = [], [Fraction(0)] * len(exact)
    for _ in range(period):
        behind = [debt + share for debt, share in zip(behind, exact, strict=True)]
        chosen = behind.index(max(behind))
        behind[chosen] -= 1
        pattern.append(chosen)
    return np.array(pattern, np.int64)


def streams_by_rank(pattern: IntArray, first_rank: int, count: int, key: int) -> IntArray:
    """The stream of each piece, from its rank in the plan; as many in a row as the pattern has hold its shares.

    Args:
        pattern: one period, as `stream_pattern` deals it out.
        first_rank: of the first piece.
        count: number of pieces.
        key: random bits of the epoch: a document changes streams between epochs.

    >>> streams_by_rank(np.array([0, 0, 1, 0, 0]), first_rank=2, count=3, key=0).tolist()
    [1, 0, 0]
    """
    return pattern[(first_rank + key % len(pattern) + np.arange(count)) % len(pattern)]


def streams_by_tokens(lengths: IntArray, shares: Sequence[float], start: float) -> IntArray:
    """The stream of each piece of a pack, so that each stream's share of the tokens is near its own.

    The tokens of a pack stand on a circle, of which each stream has an arc; a piece belongs to where its middle is.
    The circle's random turn gives every piece the shares as its probabilities, so over packs they are exact.

    Args:
        lengths: tokens of each piece, (N,).
        shares: of each stream; they sum to 1.
        start: random number of the pack, in [0, 1): where the circle begins.

    >>> streams_by_tokens(np.array([100, 100, 400]), [0.5, 0.5], start=0.9).tolist()
    [1, 0, 1]
    """
    middles = (np.cumsum(lengths) - lengths / 2) / max(int(lengths.sum()), 1)
    arcs = np.cumsum(np.asarray(shares, float))[:-1]
    return np.searchsorted(arcs, (middles + start) % 1.0, side="right").astype(np.int64)


def piece_weights(
    how: Aggregation,
    counts: IntArray,
    streams: IntArray,
    weights: Sequence[float],
    step_counts: Sequence[int] | None = None,
) -> tuple[FloatArray, float]:
    """What each target of a piece counts, and what the sum over the micro-batch adds to the step's divisor.

    The loss of a step is the sum of its weighted target losses over the sum of the divisors of its micro-batches and
    ranks. "tokens" pools all targets; "streams" is the weighted mean of the streams' means; "inputs" is the mean over
    documents (pieces) of each one's own mean. Twenty targets of loss 2 in four documents and fifty of loss 4 in one:

    >>> counts, streams = np.array([5, 5, 5, 5, 50]), np.array([0, 0, 0, 0, 1])
    >>> sums = np.array([10.0, 10, 10, 10, 200])
    >>> for how in ("tokens", "streams", "inputs"):
    ...     each, divisor = piece_weights(how, counts, streams, [1.0, 1.0], step_counts=[20, 50])
    ...     print(how, round((each * sums).sum() / divisor, 2))
    tokens 3.43
    streams 3.0
    inputs 2.4

    Args:
        how: the aggregation.
        counts: targets of each piece, (N,).
        streams: stream of each piece, (N,).
        weights: of each stream, (S,).
        step_counts: targets of each stream in the whole optimizer step, over all its micro-batches and ranks, (S,);
            needed for "streams", which is defined per optimizer step.

    Returns:
        Weight of each of a piece's targets, (N,); and the divisor.
    """
    each = np.asarray(weights, float)[streams]
    if how == "tokens":
        return each, float((each * counts).sum())
    if how == "inputs":
        each = np.where(counts > 0, each / np.maximum(counts, 1), 0.0)
        return each, float((each * counts).sum())
    assert step_counts is not None
    each = each / np.maximum(np.asarray(step_counts)[streams], 1)
    return each, float((each * counts).sum())
