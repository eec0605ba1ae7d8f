"""The loss of a micro-batch whose documents are masked at several ratios: who is in which stream, and what counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lit_encoders.data.packs import Pack, PackedBatch, PackPlan, eligible_spans
from lit_encoders.models.backbone import RowGroup
from lit_encoders.objectives.hashing import Purpose, document_keys, single_key, uniform
from lit_encoders.objectives.masking import Targets, count_targets, spread
from lit_encoders.objectives.streams import (
    Aggregation,
    FloatArray,
    IntArray,
    MaskStream,
    SharesOf,
    piece_weights,
    stream_pattern,
    streams_by_rank,
    streams_by_tokens,
)


@dataclass(frozen=True)
class StreamDealer:
    """Deals documents to streams, and knows what the targets of each count.

    Attributes:
        streams: in order.
        shares_of: whether shares are of documents or of tokens.
        aggregation: how losses become one number.
        seed: of the run.
    """

    streams: Sequence[MaskStream]
    shares_of: SharesOf
    aggregation: Aggregation
    seed: int

    def members(self, pack: Pack | PackedBatch) -> IntArray:
        """The stream of each piece of a pack, by number, (N,): a function of the plan, the seed and the epoch."""
        shares = tuple(stream.share for stream in self.streams)
        if self.shares_of == "tokens":
            of_pack = np.array([single_key(self.seed, Purpose.STREAM, *pack.here)], dtype=np.uint64)
            return streams_by_tokens(pack.lengths, shares, float(uniform(of_pack)[0]))
        key = single_key(self.seed, Purpose.STREAM, pack.here.epoch, pack.here.window)
        return streams_by_rank(stream_pattern(shares), pack.first_rank, len(pack.documents), key)

    def ratios(self, members: IntArray) -> FloatArray:
        """Mask ratio of each piece, (N,)."""
        return np.array([stream.mask_ratio for stream in self.streams])[members]

    def step_counts(self, plan: PackPlan, batch: PackedBatch, micro_batches: int, ends: bool) -> list[int]:
        """Targets of each stream in the whole optimizer step that begins with a micro-batch, over all ranks, (S,).

        They follow from the plan alone, so no rank has to ask another, and none has to wait.

        Args:
            plan: that the packs come from.
            batch: the step's first micro-batch on this rank.
            micro_batches: of the step, times the number of ranks.
            ends: whether training ends with the epoch, so that the last step may lack packs.
        """
        counts = np.zeros(len(self.streams), np.int64)
        for _, pack in zip(range(micro_batches), plan.sequence(batch.group), strict=False):
            if ends and pack.here.epoch != batch.group.epoch:
                break
            members = self.members(pack)
            rounding = uniform(document_keys(self.seed, pack.here.epoch, Purpose.ROUNDING, pack.documents))
            of_piece = count_targets(eligible_spans(plan.store, pack), self.ratios(members), rounding)
            counts += np.bincount(members, weights=of_piece, minlength=len(counts)).astype(np.int64)
        return counts.tolist()  # type: ignore[no-any-return]

    def groups(
        self, batch: PackedBatch, targets: Targets, members: IntArray, step_counts: Sequence[int] | None
    ) -> tuple[list[RowGroup], float]:
        """The targets of each stream, with what each counts; and what the micro-batch adds to the step's divisor."""
        weights = [stream.weight for stream in self.streams]
        each, divisor = piece_weights(self.aggregation, targets.counts, members, weights, step_counts)
        segments = batch.segment_ids[targets.rows]
        of_target = spread(torch.from_numpy(members), segments, len(members))
        row_weights = spread(torch.from_numpy(each).float(), segments, len(members))
        found = []
        for number, stream in enumerate(self.streams):
            # Known on the host: no step waits for the device to count.
            size = int(targets.counts[members == number].sum())
            rows: Tensor = torch.nonzero_static(of_target == number, size=size)[:, 0]
            found.append(RowGroup(targets.rows[rows], targets.labels[rows], row_weights[rows], stream.head))
        return found, divisor
