"""LitEncoder: a backbone, its LM head, and one attribute, `objective`, that decides how they are trained."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal, get_args

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from lit_encoders.data.packs import PackedBatch
from lit_encoders.models.attention import AttentionBackend
from lit_encoders.models.backbone import Backbone, RowGroup
from lit_encoders.modules.backbone_module import BackboneModule
from lit_encoders.modules.backbone_module import Dtype as Dtype
from lit_encoders.modules.checkpoint_facts import check_same_run, check_state, phases_so_far
from lit_encoders.modules.held_out import HeldOutLosses, log_held_out, measuring
from lit_encoders.modules.pack_targets import masked_targets
from lit_encoders.modules.settings import check_choice, check_masking, check_optimizer, check_stream_settings
from lit_encoders.modules.source_records import source_counts, source_records, source_terms
from lit_encoders.modules.stream_loss import StepTargets, StreamDealer, groups_by_term, loss_terms
from lit_encoders.modules.stream_records import count_names, loss_names, stream_counts, stream_records
from lit_encoders.modules.token_mean import Loss as Loss
from lit_encoders.objectives import Objective
from lit_encoders.objectives.causal import clm_targets
from lit_encoders.objectives.hashing import Purpose, single_key
from lit_encoders.objectives.masking import Ratio, Targets
from lit_encoders.objectives.streams import Aggregation, MaskStream, SharesOf, check_documents, main_head
from lit_encoders.optim.param_groups import apply_scales, parameter_groups

OptimizerCallable = Callable[[Any], Optimizer]
LRSchedulerCallable = Callable[[Optimizer], LRScheduler]
ClmHead = Literal["shared", "copy", "fresh"]

# Validation masks are the same in every run, so that runs can be compared.
VALIDATION_SEED = 0


class LitEncoder(BackboneModule):
    """Pretrain a Hugging Face encoder (or decoder) on packs of documents, by MLM or CLM.

    Setting ``module.objective = "clm"`` turns attention, labels and head together, from the next step on; optimizer
    state and data position go on untouched. The gradient of an optimizer step is the sum over the targets of all its
    micro-batches and ranks, divided by their number once, before any callback sees it.

    Subclasses override `training_loss` for another objective, or ``configure_optimizers``; nothing else has to change.

    Logged: ``train/{mlm_loss,clm_loss,objective,tokens,targets,learning_rate}`` (of the sources of a mixture
    ``train/<name>/{tokens,mlm_loss,clm_loss}``), ``val/{mlm,clm}_{loss,perplexity}`` (``val/<name>/...`` for named
    sets), and with TensorBoard ``tokens/...``, the losses against tokens. Losses are nats per target.

    Args:
        backbone: folder or hub name of a masked or causal LM, ``example:NAME``, or the settings of a configuration
            with its ``model_type``, for a model without pretrained weights.
        tokenizer: folder or hub name; None takes the backbone's.
        objective: "mlm" or "clm", a schedule may change it; None is the class's `default_objective`.
        mask_ratio: share of eligible tokens that are MLM targets, in (0, 1].
        corruption_ratio: share of eligible tokens that ``corruption`` applies to; None is ``mask_ratio``.
        corruption: of the corrupted tokens, shares that become the mask token, a random token, or stay; sum 1.
        whole_words: mask all pieces of a word or none.
        val_mask_ratio: mask ratio in validation, so that curves go on through a change of ``mask_ratio``.
        streams: documents masked at ratios of their own, in place of ``mask_ratio``; see `MaskStream`.
        aggregation: how the losses of streams become one: all targets pooled ("tokens"), the weighted mean of the
            streams' means over the optimizer step ("streams"), or the mean over documents of each one's mean
            ("inputs"). UltraBERT does not say which it used.
        shares_of: whether streams have their shares of the documents or of the tokens.
        tie_decoder: one decoder matrix for the heads of all streams; else each has its own.
        mask_token: token to mask with where the tokenizer has none.
        clm_head: LM head of CLM steps: the one of MLM ("shared"; the paper does not say which it used), one of its own
            that takes over the MLM head's values at the first CLM step ("copy"), or a new one ("fresh"). The MLM head
            rests meanwhile, weights and moments, and is what is exported.
        attention: "auto" takes the fastest that is there.
        dtype: of the trainable weights, whatever the stored type.
        activation_checkpointing: keep only the blocks' inputs for the backward pass: less memory, a third more time.
        compile: compile the encoder with torch.compile.
        learning_rate: peak; a schedule multiplies it.
        betas: of AdamW.
        eps: of AdamW.
        weight_decay: of AdamW (times the learning rate); none on norms and biases.
        no_decay: layer ranges that do not decay, such as "9:28" or "embeddings".
        layer_decay: learning-rate factor from one layer to the one below, in (0, 1].
        optimizer: makes another optimizer from the parameter groups; takes the place of ``learning_rate``, ``betas``
            and ``eps``.
        lr_scheduler: stepped once per optimizer step; not beside a schedule.
        seed: of masks, dropout and new weights; None takes the one of ``seed_everything``, else 0.

    Raises:
        ValueError: a value is out of its range, the backbone is not known, or tokenizer and model do not fit.
    """

    default_objective: Objective = "mlm"
    # Whether there is a teacher to learn from: LitKD's.
    distils = False
    # What validations measure; None is every objective that the tokenizer allows.
    val_objectives: Sequence[Objective] | None = None

    def __init__(
        self,
        backbone: str | dict[str, Any],
        tokenizer: str | None = None,
        objective: Objective | None = None,
        mask_ratio: float = 0.15,
        corruption_ratio: float | None = None,
        corruption: tuple[float, float, float] = (0.8, 0.1, 0.1),
        whole_words: bool = False,
        val_mask_ratio: float = 0.15,
        streams: list[MaskStream] | None = None,
        aggregation: Aggregation = "tokens",
        shares_of: SharesOf = "documents",
        tie_decoder: bool = False,
        mask_token: str | None = None,
        clm_head: ClmHead = "shared",
        attention: AttentionBackend = "auto",
        dtype: Dtype = "float32",
        activation_checkpointing: bool = False,
        compile: bool = False,
        learning_rate: float = 2e-4,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-6,
        weight_decay: float = 0.05,
        no_decay: list[str] | None = None,
        layer_decay: float | None = None,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        seed: int | None = None,
    ) -> None:
        # Before anything is read.
        mask_streams = [MaskStream(**s) if isinstance(s, Mapping) else s for s in streams or []]
        check_choice("clm_head", clm_head, ClmHead)
        check_masking(mask_ratio, val_mask_ratio, corruption_ratio, corruption)
        check_optimizer(learning_rate, betas, eps, weight_decay, layer_decay)
        check_stream_settings(mask_streams, aggregation, shares_of, whole_words, self.distils)
        super().__init__(backbone, tokenizer, mask_token, attention, dtype, activation_checkpointing, compile, seed)
        self.save_hyperparameters(ignore=["optimizer", "lr_scheduler", "streams"])
        self.streams = mask_streams
        # Checkpoints hold plain types.
        self.hparams["streams"] = [asdict(stream) for stream in self.streams] or None
        self.mask_ratio = mask_ratio
        self.corruption_ratio = corruption_ratio
        self.corruption = corruption
        self.whole_words = whole_words
        self.val_mask_ratio = val_mask_ratio
        self.aggregation = aggregation
        self.tie_decoder = tie_decoder
        self.clm_head = clm_head
        self.learning_rate = learning_rate
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.no_decay = no_decay or []
        self.layer_decay = layer_decay
        self.optimizer_callable = optimizer
        self.lr_scheduler_callable = lr_scheduler
        named = [replace(stream, head=self.head_key(stream.head)) for stream in self.streams]
        self.dealer = StreamDealer(named, shares_of, aggregation, self.seed)
        self._step_targets = StepTargets(self.dealer)
        self._clm_head_filled = clm_head == "fresh"
        self._held_out: list[HeldOutLosses] = []
        self.objective = objective or self.default_objective

    # ---- objective and heads ---------------------------------------------------------------------------------------

    @property
    def main_head(self) -> str | None:
        """The streams' head that is the model's own, and so is exported; None where a stream names no head."""
        return main_head(self.streams)

    def head_key(self, head: str | None) -> str | None:
        """The added head of that name, None for the model's own."""
        return None if head == self.main_head else head

    @property
    def objective(self) -> Objective:
        """What the next step trains: attention direction, labels and head follow from this word alone."""
        return self._objective

    @objective.setter
    def objective(self, value: Objective) -> None:
        if value not in get_args(Objective):
            raise ValueError(f"objective must be 'mlm' or 'clm', got {value!r}")
        if value == "mlm":
            self.check_mlm()
        self._objective: Objective = value

    def head(self, objective: Objective) -> str | None:
        """The head that an objective uses: the name of an added one, or None for the model's own."""
        return "clm" if objective == "clm" and self._clm_head_filled else None

    @override
    def _add_heads(self, backbone: Backbone) -> None:
        for name in dict.fromkeys(stream.head for stream in self.dealer.streams if stream.head is not None):
            backbone.add_head(name, own_decoder=not self.tie_decoder)
        if self.clm_head != "shared":
            head = backbone.add_head("clm")
            if self.clm_head == "fresh":
                head.reset(backbone.model)

    @override
    def setup(self, stage: str) -> None:
        plans = getattr(getattr(self.trainer, "datamodule", None), "plans", {})
        shared = {stream.name for stream in self.streams} & set(self._sources)
        if shared:
            raise ValueError(
                f"data.train must name its sources otherwise than model.streams are named, got {sorted(shared)[0]!r}"
            )
        if stage == "fit" and self.streams and "train" in plans:
            packs = plans["train"].first_packs()
            micro_batches = self.trainer.accumulate_grad_batches * self.trainer.world_size
            check_documents(self.streams, sum(len(pack.documents) for pack in packs) / len(packs) * micro_batches)

    # ---- targets and losses ----------------------------------------------------------------------------------------

    def targets(
        self,
        batch: PackedBatch,
        objective: Objective,
        *,
        mask_ratio: Ratio,
        corruption_ratio: float | None = None,
        seed: int,
        epoch: int,
    ) -> Targets:
        """What an objective reads and predicts in a batch: a pure function of its arguments."""
        if objective == "clm":
            return clm_targets(batch.input_ids, batch.segment_ids, batch.lengths)
        self.check_mlm()
        assert self.mask_vocabulary is not None
        if not self.whole_words and self.mask_vocabulary.special.device != batch.input_ids.device:
            self.mask_vocabulary = self.mask_vocabulary.to(batch.input_ids.device)
        return masked_targets(
            batch,
            self.mask_vocabulary,
            self._continuations if self.whole_words else None,
            seed=seed,
            epoch=epoch,
            mask_ratio=mask_ratio,
            corruption_ratio=corruption_ratio,
            shares=self.corruption,
        )

    def pack_loss(self, batch: PackedBatch, objective: Objective, targets: Targets) -> Tensor:
        """Sum of the losses of a batch's targets in nats, scalar, by the model's own head or that of CLM."""
        group = RowGroup(targets.rows, targets.labels, head=self._head_in_use(objective))
        return self.group_losses(batch, objective, targets, [group])[0][0]

    def _head_in_use(self, objective: Objective) -> str | None:
        assert self.backbone is not None
        if self.training and objective == "clm" and self.clm_head == "copy" and not self._clm_head_filled:
            self.backbone.fill_head("clm")
            self._clm_head_filled = True
        return self.head(objective)

    def group_losses(
        self, batch: PackedBatch, objective: Objective, targets: Targets, groups: Sequence[RowGroup]
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Losses of groups of targets; see `Backbone.forward`."""
        assert self.backbone is not None
        if self.training:
            for group in groups:
                # A head without targets in the step gets a gradient of zero, which would still move it.
                if len(group.rows):
                    self.use_head(group.head)
        packing = self.packing(batch, objective)
        return self.backbone(targets.input_ids, batch.position_ids, packing, groups)  # type: ignore[no-any-return]

    def with_teacher(
        self, batch: PackedBatch, objective: Objective, targets: Targets, groups: list[RowGroup], distil: list[bool]
    ) -> list[RowGroup]:
        """The groups with a teacher beside those to distil; without a teacher, as they are. See `LitKD`."""
        return groups

    def training_loss(self, batch: PackedBatch) -> Loss:
        """The loss of a micro-batch: override for an objective of your own.

        Args:
            batch: packed ids, on the device.

        Returns:
            A sum over targets and their number, never a mean: the step divides once for all micro-batches and ranks.
        """
        targets, groups, divisor, members = self._prepare(batch)
        objective, streams = self.objective, [] if members is None else self.streams
        distil = [stream.distill for stream in streams] or [self.distils]
        taught = self.with_teacher(batch, objective, targets, groups, distil)
        losses = self.group_losses(batch, objective, targets, taught)
        # Not `distil`: a step whose objective asks no teacher has no such loss, rather than one of 0.
        asked = [group.teacher is not None for group in taught]
        terms = loss_terms(objective, losses, asked, [stream.name for stream in streams])
        counts = {} if members is None else stream_counts(streams, members, targets)
        sources = self._sources
        return Loss(
            total=torch.stack([total for total, _, _ in losses]).sum(),
            num_targets=targets.num_targets,
            terms={**terms, **source_terms(terms, sources, batch.source)},
            divisor=divisor,
            counts={**counts, **source_counts(batch.num_tokens, sources, batch.source)},
        )

    @property
    def _sources(self) -> list[str]:
        """Names of the sources that the data mixes."""
        return getattr(getattr(self._trainer, "datamodule", None), "source_names", [])

    def _prepare(self, batch: PackedBatch) -> tuple[Targets, list[RowGroup], float | None, Any]:
        """Targets of a micro-batch, by stream; what it adds to the step's divisor; and the stream of each piece."""
        objective = self.objective
        members = self.dealer.members(batch) if self.streams and objective == "mlm" else None
        targets = self.targets(
            batch,
            objective,
            mask_ratio=self.mask_ratio if members is None else self.dealer.ratios(members),
            corruption_ratio=self.corruption_ratio,
            seed=self.seed,
            epoch=batch.here.epoch,
        )
        if members is None:
            return targets, [RowGroup(targets.rows, targets.labels, head=self._head_in_use(objective))], None, None
        of_step = self._step_targets.at(self.trainer, batch) if self.aggregation == "streams" else None
        groups, divisor = self.dealer.groups(batch, targets, members, of_step)
        return targets, groups, divisor, members

    def loss_parts(self, batch: PackedBatch) -> tuple[dict[str, Tensor], float]:
        """The loss of a micro-batch in its parts, for `GradientProbe`: sums with gradients, by stream and by term.

        Args:
            batch: packed ids, on the device, of a step that trains MLM.

        Returns:
            ``<stream>``, and where a teacher is asked ``<stream>.mlm`` and ``<stream>.kd``; and the micro-batch's part
            of the step's divisor.
        """
        torch.manual_seed(single_key(self.seed, Purpose.DROPOUT, *batch.counters) >> 1)
        targets, groups, divisor, _ = self._prepare(batch)
        assert self.backbone is not None
        distil = [stream.distill for stream in self.streams]
        taught = self.with_teacher(batch, "mlm", targets, groups, distil)
        named = groups_by_term([stream.name for stream in self.streams], taught)
        packing = self.packing(batch, "mlm")
        losses = self.backbone(targets.input_ids, batch.position_ids, packing, list(named.values()))
        return {name: total for name, (total, _, _) in zip(named, losses, strict=True)}, float(divisor or 0.0)

    @override
    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        # Dropout draws from a generator: seeding it per pack leaves nothing to save, and nothing to disturb.
        torch.manual_seed(single_key(self.seed, Purpose.DROPOUT, *batch.counters) >> 1)
        return self.step_loss(self.training_loss(batch), batch.num_tokens)

    @override
    def resting_parameters(self, heads: set[str | None]) -> Iterable[nn.Parameter]:
        # A loss of a subclass may have called the backbone itself: then the objective says which head it used.
        return [] if self.backbone is None else self.backbone.resting_parameters(heads or {self.head(self.objective)})

    @override
    def step_metrics(self) -> dict[str, float]:
        return {"train/objective": float(get_args(Objective).index(self.objective))}

    # ---- validation ------------------------------------------------------------------------------------------------

    def _new_losses(self, name: str) -> HeldOutLosses:
        """What a validation set measures: each objective that can be measured."""
        objectives: Sequence[Objective] = ["clm"] if self.mask_vocabulary is None else ["mlm", "clm"]
        return HeldOutLosses(name, self.val_objectives or objectives, self.device)

    def _add_losses(self, losses: HeldOutLosses, batch: PackedBatch) -> None:
        for objective in losses.means:
            targets = self.targets(batch, objective, mask_ratio=self.val_mask_ratio, seed=VALIDATION_SEED, epoch=0)
            if targets.num_targets:
                losses.add(objective, self.pack_loss(batch, objective, targets), targets.num_targets)

    @torch.no_grad()
    def held_out_losses(self, sets: Mapping[str, Iterable[PackedBatch]]) -> dict[str, float]:
        """Measure the model as it stands, on what a validation would: nothing is logged, no callback is called.

        Args:
            sets: batches of each validation set, by name; the same number on every rank.

        Returns:
            ``val/{mlm,clm}_loss``, or ``val/<name>/...`` for a named set: nats per target, over all ranks.
        """
        found: dict[str, float] = {}
        with measuring(self):
            for name, batches in sets.items():
                losses = self._new_losses(name)
                for batch in batches:
                    self._add_losses(losses, batch.to(self.device))
                found |= {name: float(loss) for name, loss in losses.compute().items()}
        return found

    @override
    def on_validation_epoch_start(self) -> None:
        names = getattr(getattr(self.trainer, "datamodule", None), "val_names", [""])
        self._held_out = [self._new_losses(name) for name in names]

    @override
    def validation_step(self, batch: PackedBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._add_losses(self._held_out[dataloader_idx], batch)

    @override
    def on_validation_epoch_end(self) -> None:
        log_held_out(self, {name: loss for losses in self._held_out for name, loss in losses.compute().items()})

    # ---- optimizer and state ---------------------------------------------------------------------------------------

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        try:
            groups = parameter_groups(self, self.weight_decay, self.no_decay, self.layer_decay)
        except ValueError as error:
            raise ValueError(f"model.no_decay: {error}") from error
        if self.optimizer_callable is not None:
            optimizer = self.optimizer_callable(groups)
        else:
            optimizer = AdamW(groups, lr=self.learning_rate, betas=self.betas, eps=self.eps, fused=True)
            # The fused step could unscale gradients itself; then Lightning could not clip them before.
            optimizer._step_supports_amp_scaling = False
        apply_scales(optimizer.param_groups)
        if self.lr_scheduler_callable is None:
            return optimizer
        scheduler = self.lr_scheduler_callable(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def facts(self) -> dict[str, Any]:
        """Where the model stands: what a model card and an export from a checkpoint need, in plain types."""
        schedule = [p for c in self.trainer.callbacks for p in getattr(c, "resolved", [])]  # type: ignore[attr-defined]
        metrics = self.trainer.callback_metrics
        return {
            "base": str(self.hparams.get("backbone")) if isinstance(self.source, str) else self.config.model_type,
            "tokenizer": self.tokenizer.name_or_path,
            "data": list(getattr(getattr(self.trainer, "datamodule", None), "files", [])),
            "phases": phases_so_far(schedule, self.objective, self.trainer.global_step),
            "tokens": self.tokens,
            "clm_head_filled": self._clm_head_filled,
            "main_head": self.main_head,
            "losses": {name: float(metrics[name]) for name in metrics if re.fullmatch(r"val/.*loss", name)},
        }

    def records(self) -> dict[str, Any]:
        """What a reproduction has to record of streams and sources, over all ranks; every rank has to ask.

        Of streams documents, targets, mean losses and the aggregation's name, of the sources of a mixture their tokens.
        """
        totals, sums = self._counted_by_all(self._counted_names), self._summed_by_all()
        of_streams = stream_records(self.streams, self.aggregation, totals, sums) if self.streams else {}
        return {**of_streams, **source_records(self._sources, totals)}

    @property
    @override
    def summed_names(self) -> list[str]:
        return loss_names(self.streams, self.distils)

    @property
    def _counted_names(self) -> list[str]:
        return [*count_names(self.streams), *source_counts(0, self._sources, 0)]

    def _identity(self) -> dict[str, Any]:
        """What a run's steps depend on; the configuration also makes an export of it, should its folder be gone."""
        return {"config": json.dumps(self.config.to_dict(), default=str), "seed": self.seed}

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["lit_encoders"] = {
            **self._identity(),
            "counted": self._counted_by_all(self._counted_names),
            "summed": self._summed_by_all(),
            **self.facts(),
        }

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "state_dict" in checkpoint:  # A sharded run has loaded its weights by now.
            check_state(self.state_dict(), checkpoint["state_dict"])
        if self._trainer is not None and self.trainer.state.fn == "fit":
            check_same_run(self._identity(), checkpoint["lit_encoders"])
        self._tokens = torch.tensor(checkpoint["lit_encoders"]["tokens"])
        self._clm_head_filled = checkpoint["lit_encoders"]["clm_head_filled"]
        # The file holds the sum over all ranks: one of them goes on from it.
        first = self._trainer is None or self.global_rank == 0
        self.counted = Counter(checkpoint["lit_encoders"].get("counted", {}) if first else {})
        sums = checkpoint["lit_encoders"].get("summed", {}) if first else {}
        self.summed = {name: torch.tensor(nats, dtype=torch.float64) for name, nats in sums.items()}
