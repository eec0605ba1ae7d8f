"""What a run with mask streams counts, and what a reproduction has to record of them: documents and targets of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lit_encoders.objectives.masking import Targets
from lit_encoders.objectives.streams import Aggregation, IntArray, MaskStream

# Of each stream.
COUNTED = ("documents", "targets")


def count_names(streams: Sequence[MaskStream]) -> list[str]:
    """What is counted: ``<stream>/documents`` and ``<stream>/targets``.

    >>> count_names([MaskStream("narrow", 0.05, 1.0)])
    ['narrow/documents', 'narrow/targets']
    """
    return [f"{stream.name}/{what}" for stream in streams for what in COUNTED]


def loss_names(streams: Sequence[MaskStream], distils: bool) -> list[str]:
    """Losses that are summed up: ``<stream>/mlm_loss``, and of those that a teacher is learnt on ``<stream>/kd_loss``.

    >>> loss_names([MaskStream("low", 0.05, 0.8, distill=True), MaskStream("high", 0.5, 0.2)], distils=True)
    ['low/mlm_loss', 'low/kd_loss', 'high/mlm_loss']
    """
    return [
        f"{stream.name}/{loss}"
        for stream in streams
        for loss in ("mlm_loss", *(["kd_loss"] if distils and stream.distill else []))
    ]


def stream_counts(streams: Sequence[MaskStream], members: IntArray, targets: Targets) -> dict[str, int]:
    """Documents (pieces of them) and targets of each stream in a micro-batch, by name.

    Args:
        streams: of the run.
        members: stream of each piece, by number, (N,).
        targets: of the micro-batch.
    """
    counts = {}
    for number, stream in enumerate(streams):
        mine = members == number
        counts[f"{stream.name}/documents"] = int(mine.sum())
        counts[f"{stream.name}/targets"] = int(targets.counts[mine].sum())
    return counts


def stream_records(
    streams: Sequence[MaskStream], aggregation: Aggregation, totals: Mapping[str, int], sums: Mapping[str, float]
) -> dict[str, Any]:
    """The aggregation, and each stream's settings beside what it got; in plain types.

    Losses are means over all of a stream's targets in the run, nats; None where it had none.

    Args:
        streams: as the user gave them.
        aggregation: how their losses become one.
        totals: of the run over all ranks, by the names of `count_names`.
        sums: nats of the run over all ranks, by the names of `loss_names`.
    """

    def got(stream: MaskStream) -> dict[str, Any]:
        counts = {what: totals[f"{stream.name}/{what}"] for what in COUNTED}
        losses = {
            loss: sums[f"{stream.name}/{loss}"] / counts["targets"] if counts["targets"] else None
            for loss in ("mlm_loss", "kd_loss")
            if f"{stream.name}/{loss}" in sums
        }
        return {**counts, **losses}

    return {
        "aggregation": aggregation,
        "streams": {stream.name: {**asdict(stream), **got(stream)} for stream in streams},
    }
