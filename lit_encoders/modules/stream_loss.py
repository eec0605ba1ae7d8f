"""The loss of a micro-batch whose documents are masked at several ratios: who is in which stream, and what counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lit_encoders.data.packs import Pack, PackedBatch, Plan, eligible_spans
from lit_encoders.models.backbone import RowGroup
from lit_encoders.objectives import Objective
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


def loss_terms(
    objective: Objective, losses: Sequence[tuple[Tensor, Tensor, Tensor]], taught: Sequence[bool], names: Sequence[str]
) -> dict[str, tuple[Tensor, int]]:
    """Unweighted losses for the log: over all targets, and of each stream; the same names on every rank.

    Args:
        objective: of the step.
        losses: of each group of targets, as `Backbone.forward` gives them.
        taught: whether a teacher was asked about each group.
        names: of the streams, in the order of the groups; none where all targets are one group.

    Returns:
        Sum in nats, scalar, and number of targets, by name: ``mlm_loss``, ``kd_loss``, ``<stream>/mlm_loss``, ...
    """
    parts = {f"{objective}_loss": [(rows.sum(), len(rows)) for _, rows, _ in losses]}
    divergences = [(kd.sum(), len(kd)) for (_, _, kd), wanted in zip(losses, taught, strict=True) if wanted]
    if divergences:
        parts["kd_loss"] = divergences
    for name, (_, rows, kd), wanted in zip(names, losses, taught, strict=False):
        parts[f"{name}/{objective}_loss"] = [(rows.sum(), len(rows))]
        if wanted:
            parts[f"{name}/kd_loss"] = [(kd.sum(), len(kd))]
    return {
        name: (torch.stack([total for total, _ in found]).sum(), sum(count for _, count in found))
        for name, found in parts.items()
    }


def groups_by_term(names: Sequence[str], groups: Sequence[RowGroup]) -> dict[str, RowGroup]:
    """The targets of each stream; and where a teacher is asked, once for each of the two terms of their loss.

    Args:
        names: of the streams.
        groups: the targets of each, with what they count.

    Returns:
        ``<stream>``, and where it has a teacher ``<stream>.mlm`` and ``<stream>.kd``, which add up to it.
    """
    named: dict[str, RowGroup] = {}
    for name, group in zip(names, groups, strict=True):
        named[name] = group
        if group.teacher is not None:
            assert group.weights is not None
            alone = replace(group, teacher=None, weights=group.weights * (1.0 - group.kd_weight))
            named[f"{name}.mlm"] = alone
            named[f"{name}.kd"] = replace(group, weights=group.weights * group.kd_weight, kd_weight=1.0)
    return named


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

    def step_counts(self, plan: Plan, batch: PackedBatch, micro_batches: int, ends: bool) -> list[int]:
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


class StepTargets:
    """How many targets each stream has in the optimizer step at hand, for an aggregation that is defined per step.

    Args:
        dealer: of the run.
    """

    def __init__(self, dealer: StreamDealer) -> None:
        self.dealer = dealer
        self._counts: list[int] | None = None

    def at(self, trainer: Trainer, batch: PackedBatch) -> list[int]:
        """Over all ranks, (S,); counted where a step begins.

        Args:
            trainer: of the run.
            batch: the micro-batch at hand.

        Raises:
            ValueError: the data has no plan that says which packs the step will have.
        """
        data = getattr(trainer, "datamodule", None)
        if not hasattr(data, "plans"):
            raise ValueError("model.aggregation must be 'tokens' or 'inputs' without a TextDataModule, got 'streams'")
        loop = trainer.fit_loop.epoch_loop
        if self._counts is None or loop.batch_idx % trainer.accumulate_grad_batches == 0:
            # trainer.limit_train_batches may cut the last step short.
            left = trainer.num_training_batches - loop.batch_idx
            packs = int(min(trainer.accumulate_grad_batches, left)) * trainer.world_size
            ends = trainer.max_epochs not in (None, -1)
            self._counts = self.dealer.step_counts(data.plans["train"], batch, packs, ends)  # type: ignore[union-attr]
        return self._counts
