"""Streams get the shares they are given, and each aggregation is the one of its definition."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from lit_encoders.objectives.streams import (
    MaskStream,
    check_documents,
    check_streams,
    main_head,
    piece_weights,
    stream_pattern,
    streams_by_rank,
    streams_by_tokens,
)

NARROW, WIDE = MaskStream("narrow", 0.05, 0.8), MaskStream("wide", 0.5, 0.2)


@pytest.mark.parametrize(
    ("shares", "period"),
    [([0.8, 0.2], [4, 1]), ([0.5, 0.3, 0.2], [5, 3, 2]), ([1 / 3, 2 / 3], [1, 2]), ([0.7, 0.3], [7, 3]), ([1.0], [1])],
)
def test_a_period_holds_the_shares_exactly_wherever_it_begins(shares: list[float], period: list[int]) -> None:
    pattern = stream_pattern(tuple(shares))
    assert len(pattern) == sum(period)
    for first, key in itertools.product(range(len(pattern)), (0, 1, 12345678901234567890)):
        dealt = streams_by_rank(pattern, first, len(pattern), key)
        assert np.bincount(dealt).tolist() == period


@pytest.mark.parametrize("shares", [[0.8, 0.2], [0.5, 0.3, 0.2], [0.9, 0.05, 0.05], [0.615, 0.385]])
def test_no_beginning_is_a_whole_document_away_from_its_shares(shares: list[float]) -> None:
    pattern = stream_pattern(tuple(shares))
    so_far = np.cumsum(np.eye(len(shares))[pattern], axis=0)
    wanted = np.arange(1, len(pattern) + 1)[:, None] * np.array(shares)
    assert np.abs(so_far - wanted).max() < 1


def test_a_run_of_pieces_in_parts_is_dealt_as_the_whole() -> None:
    pattern = stream_pattern((0.5, 0.3, 0.2))
    whole = streams_by_rank(pattern, 0, 40, key=7)
    parts = [streams_by_rank(pattern, first, 8, key=7) for first in range(0, 40, 8)]
    assert np.array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("shares", [[0.8, 0.2], [0.5, 0.3, 0.2]])
def test_shares_of_tokens_are_met_by_documents_of_any_length(shares: list[float]) -> None:
    """Packs of few, unlike documents: right within 2 % over many packs."""
    draw = np.random.default_rng(0)
    tokens = np.zeros(len(shares))
    for _ in range(4000):
        lengths = np.sort(draw.integers(3, 300, draw.integers(1, 9)))
        tokens += np.bincount(streams_by_tokens(lengths, shares, draw.random()), weights=lengths, minlength=len(shares))
    assert tokens / tokens.sum() == pytest.approx(shares, abs=0.02)


@pytest.mark.parametrize("lengths", [[100], [3, 10, 400], [50] * 7])
def test_every_document_of_a_pack_has_the_shares_as_its_probabilities(lengths: list[int]) -> None:
    starts = (np.arange(1000) + 0.5) / 1000
    dealt = np.array([streams_by_tokens(np.array(lengths), [0.5, 0.3, 0.2], start) for start in starts])
    for of_document in dealt.T:
        assert np.bincount(of_document, minlength=3) / 1000 == pytest.approx([0.5, 0.3, 0.2], abs=2e-3)
    assert len(streams_by_tokens(np.array([], np.int64), [0.5, 0.5], 0.5)) == 0


@pytest.mark.parametrize(("how", "loss"), [("tokens", 240 / 70), ("streams", 3.0), ("inputs", 2.4)])
def test_three_aggregations_of_the_same_losses(how: Any, loss: float) -> None:
    """Four documents with five targets of loss 2 each, one with fifty of loss 4."""
    counts, streams = np.array([5, 5, 5, 5, 50]), np.array([0, 0, 0, 0, 1])
    each, divisor = piece_weights(how, counts, streams, [1.0, 1.0], step_counts=[20, 50])
    assert (each * counts * np.array([2, 2, 2, 2, 4])).sum() / divisor == pytest.approx(loss)


@pytest.mark.parametrize(
    ("how", "loss"),
    [
        ("tokens", (20 * 2 + 3 * 50 * 4) / (20 + 3 * 50)),
        ("streams", (2 + 3 * 4) / 4),
        ("inputs", (4 * 2 + 3 * 4) / (4 + 3)),
    ],
)
def test_a_weight_of_three_counts_three_times(how: Any, loss: float) -> None:
    """As above, and in two micro-batches, whose sums and divisors add up."""
    counts, streams, losses = np.array([5, 5, 5, 5, 50]), np.array([0, 0, 0, 0, 1]), np.array([2.0, 2, 2, 2, 4])
    total = divisor = 0.0
    for part in (slice(0, 2), slice(2, 5)):
        each, of_part = piece_weights(how, counts[part], streams[part], [1.0, 3.0], step_counts=[20, 50])
        total += (each * counts[part] * losses[part]).sum()
        divisor += of_part
    assert total / divisor == pytest.approx(loss)


@pytest.mark.parametrize("how", ["tokens", "streams", "inputs"])
def test_m01_documents_without_targets_count_nothing(how: Any) -> None:
    """A stream without targets is no part of the mean; no target at all gives 0 over 0, and no NaN."""
    each, divisor = piece_weights(how, np.array([0, 4]), np.array([0, 1]), [1.0, 1.0], step_counts=[0, 4])
    assert (each * [0, 4] * np.array([0.0, 2.0])).sum() / divisor == pytest.approx(2.0)
    each, divisor = piece_weights(how, np.array([0]), np.array([1]), [1.0, 1.0], step_counts=[0, 0])
    assert divisor == 0
    assert np.isfinite(each).all()


@pytest.mark.parametrize(
    ("streams", "message"),
    [
        ([NARROW, MaskStream("wide", 0.5, 0.3)], "model.streams must have shares that sum to 1, got 1.1"),
        ([NARROW], "model.streams must have shares that sum to 1, got 0.8"),
        ([NARROW, MaskStream("narrow", 0.5, 0.2)], "model.streams must have names of their own, got narrow, narrow"),
        ([MaskStream("a/b", 0.5, 1.0)], "model.streams must have names without '/', got 'a/b'"),
        ([MaskStream("", 0.5, 1.0)], "model.streams must have names without '/', got ''"),
        ([MaskStream("a", 0.0, 1.0)], r"model.streams 'a': mask_ratio must be in \(0, 1\], got 0.0"),
        ([MaskStream("a", 1.2, 1.0)], r"model.streams 'a': mask_ratio must be in \(0, 1\], got 1.2"),
        ([MaskStream("a", 0.5, 0.0)], r"model.streams 'a': share must be in \(0, 1\], got 0.0"),
        ([MaskStream("a", 0.5, 1.0, weight=0.0)], "model.streams 'a': weight must be above 0, got 0.0"),
        ([MaskStream("a", 0.5, 1.0, weight=float("inf"))], "model.streams 'a': weight must be above 0, got inf"),
        ([MaskStream("a", 0.5, 1.0, head="b.c")], "model.streams 'a': head must be named in letters, .* got 'b.c'"),
    ],
)
def test_streams_that_make_no_sense(streams: list[MaskStream], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check_streams(streams)
    assert "\n" not in str(caught.value)


def test_each_stream_needs_a_document_per_step() -> None:
    check_documents([NARROW, WIDE], 5.0)
    check_documents([MaskStream("a", 0.1, 0.9), MaskStream("b", 0.1, 0.1)], 10.0)  # 0.1 * 10 in floats is 1.
    with pytest.raises(ValueError, match=r"model.streams 'wide' must get at least one document .* got 0.2 of 4.0 doc"):
        check_documents([NARROW, WIDE], 4.0)


def test_awkward_shares_have_a_short_pattern_that_is_made_once() -> None:
    """Fractions over 997, 991 and their product would repeat after a million pieces."""
    shares = (1 - 100 / 997 - 100 / 991, 100 / 997, 100 / 991)
    pattern = stream_pattern(shares)
    assert len(pattern) <= 1000
    assert np.bincount(pattern) / len(pattern) == pytest.approx(shares, abs=1e-3)
    assert stream_pattern(shares) is pattern


@pytest.mark.parametrize(
    ("heads", "distilled", "own"),
    [
        ([], None, None),
        (["a", "b"], None, "a"),
        (["a", "b"], 1, "b"),
        (["a", None], 0, None),
        ([None, None], None, None),
        (["both", "both"], 1, "both"),
    ],
)
def test_the_head_that_is_exported(heads: list[str | None], distilled: int | None, own: str | None) -> None:
    streams = [MaskStream(f"s{i}", 0.1, 0.5, distill=i == distilled, head=head) for i, head in enumerate(heads)]
    assert main_head(streams) == own
