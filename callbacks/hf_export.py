"""Hugging Face folders at phases' ends, at token milestones and at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lit_encoders.callbacks.objective_schedule import find_schedule
from lit_encoders.models.sharding import gather_state
from lit_encoders.optim.budgets import Tokens
from lit_encoders.weights.export import ExportDtype, export_folder, export_state, model_card


def milestone_name(tokens: float) -> str:
    """Name the folder of a token milestone.

    >>> milestone_name(2.5e9), milestone_name(300)
    ('tokens-2.5B', 'tokens-300')
    """
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if tokens >= unit:
            return f"tokens-{tokens / unit:g}{letter}"
    return f"tokens-{tokens:g}"


def write_export(
    trainer: Trainer,
    module: Any,
    folder: Path,
    losses: Mapping[str, float] | None = None,
    note: str = "",
    dtype: ExportDtype | None = None,
) -> Path:
    """Write the weights that a module holds now, whole also where they are sharded; every process has to take part.

    Args:
        trainer: of the run.
        module: a `LitEncoder`, or any LightningModule: of one that holds one Hugging Face model that model is written,
            of another its state as ``model.safetensors``.
        folder: where.
        losses: held-out figures for the model card; None takes those of the last validation.
        note: a line to add to the model card.
        dtype: of the stored weights of a `LitEncoder`; None keeps the run's.

    Returns:
        The folder.
    """
    if hasattr(module, "backbone") and hasattr(module, "facts"):
        facts = module.facts()
        measured = facts["losses"] if losses is None else losses
        card = model_card(facts["base"], facts["data"], facts["phases"], facts["tokens"], measured) + note
        state = gather_state(module.backbone.model)
        if trainer.is_global_zero:
            export_folder(module.backbone.model, module.tokenizer, folder, card, dtype, state)
    else:
        models = [child for child in module.modules() if hasattr(child, "save_pretrained")]
        whole = models[0] if models and all(child in set(models[0].modules()) for child in models) else None
        state = gather_state(module if whole is None else whole)
        if trainer.is_global_zero:
            export_state(state, folder, whole)
    trainer.strategy.barrier()
    return folder


class HFExport(Callback):
    """Write the model where ``from_pretrained`` finds it: ``export/``, ``export/<phase>/``, ``export/tokens-1B/``.

    Each folder holds weights with the full LM head, configuration, tokenizer and a model card. Needs a `LitEncoder`.

    Args:
        at_phases: names of phases at whose end to export.
        at_tokens: numbers of real tokens at which to export.
        at_end: whether the end of the run is exported.
        dtype: of the stored weights; None keeps the run's.

    Raises:
        TypeError: the module is no LitEncoder.
        ValueError: a phase is not in the schedule, or a milestone is not above 0.
    """

    def __init__(
        self,
        at_phases: list[str] | None = None,
        at_tokens: list[Tokens] | None = None,
        at_end: bool = True,
        dtype: ExportDtype | None = None,
    ) -> None:
        super().__init__()
        if any(tokens <= 0 for tokens in at_tokens or []):
            raise ValueError(f"HFExport.at_tokens must be above 0, got {at_tokens}")
        self.at_phases = at_phases or []
        self.at_tokens = sorted(at_tokens or [])
        self.at_end = at_end
        self.dtype = dtype
        self.folder: Path | None = None
        self._step = 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not hasattr(pl_module, "backbone") or not hasattr(pl_module, "facts"):
            raise TypeError(
                "HFExport needs a LitEncoder (its `backbone`, `tokenizer` and `facts()`), "
                f"got {type(pl_module).__name__}"
            )

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        schedule = find_schedule(trainer)
        known = [] if schedule is None else [phase.name for phase in schedule.resolved]
        for name in self.at_phases:
            if name not in known:
                raise ValueError(
                    f"HFExport.at_phases must name phases of the schedule ({', '.join(known)}), got {name!r}"
                )

    @property
    @override
    def state_key(self) -> str:
        # Two may stand side by side: the one of base.yaml, and one for milestones.
        return self._generate_state_key(at_phases=self.at_phases, at_end=self.at_end, dtype=self.dtype)

    def _export(self, trainer: Trainer, module: Any, *place: str) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        folder = Path(trainer.default_root_dir).joinpath("export", *place)
        self.folder = write_export(trainer, module, folder, dtype=self.dtype)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._export_milestones(trainer, pl_module)
        if not trainer.enable_validation and trainer.global_step > self._step:
            self._export_phase(trainer, pl_module)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._step = trainer.global_step

    def _export_milestones(self, trainer: Trainer, module: Any) -> None:
        slots = getattr(getattr(trainer, "datamodule", None), "slots", None)
        while self.at_tokens:
            most = float("inf")
            if slots is not None:
                most = trainer.global_step * trainer.accumulate_grad_batches * trainer.world_size * slots
            # The bound is the host's: counting the tokens may have to wait for the device.
            if most < self.at_tokens[0] or module.tokens < self.at_tokens[0]:
                return
            self._export(trainer, module, milestone_name(self.at_tokens.pop(0)))

    def _export_phase(self, trainer: Trainer, module: Any) -> None:
        schedule = find_schedule(trainer)
        ended = None if schedule is None else schedule.ending_at(trainer.global_step)
        if ended is not None and ended.name in self.at_phases:
            self._export(trainer, module, ended.name)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # After the validation at a phase's end, so that the card has the held-out losses of this very model.
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self._export_phase(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.at_end:
            self._export(trainer, pl_module)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"at_tokens": self.at_tokens}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at_tokens = list(state_dict["at_tokens"])
