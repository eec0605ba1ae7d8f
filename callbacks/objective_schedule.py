"""Objective, mask ratio and learning rate by phases of one run; the CLM detour is a preset of it.

Source of the detour and its numbers: Touchent, de la Clergerie (2026), arXiv:2605.12438.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lit_encoders.objectives import Objective
from lit_encoders.optim.budgets import Tokens
from lit_encoders.optim.schedules import Shape, phase_factor


@dataclass(frozen=True)
class Phase:
    """One stretch of a run.

    Its length is one of ``share`` (of the schedule's budget), ``steps`` (optimizer steps) and ``tokens`` (slots, a
    little more than real tokens).

    Args:
        name: unique; names the phase's checkpoint and export.
        objective: "mlm" or "clm".
        share: of the schedule's budget, at least 0.
        steps: optimizer steps.
        tokens: slots.
        mask_ratio: of MLM in this phase; None leaves the module's own.
        warmup_steps: linear warm-up from 0, in steps; or
        warmup_tokens: the same in slots; or
        warmup_share: the same as a share of the phase, in [0, 1].
        shape: of the learning rate after the warm-up.
        final_share: share of the peak that the shape ends at.
        peak: the phase's peak, times the learning rate of the optimizer.
    """

    name: str
    objective: Objective
    share: float | None = None
    steps: int | None = None
    tokens: Tokens | None = None
    mask_ratio: float | None = None
    warmup_steps: int | None = None
    warmup_tokens: Tokens | None = None
    warmup_share: float | None = None
    shape: Shape = "constant"
    final_share: float = 0.0
    peak: float = 1.0

    def __post_init__(self) -> None:
        where = f"schedule phase {self.name!r}"
        if not self.name or "/" in self.name or self.name.startswith((".", "step-")):
            raise ValueError(
                f"schedule phase name must be usable as a file name and not begin with 'step-', got {self.name!r}"
            )
        if self.objective not in get_args(Objective):
            raise ValueError(f"{where}: objective must be 'mlm' or 'clm', got {self.objective!r}")
        if self.shape not in get_args(Shape):
            raise ValueError(f"{where}: shape must be one of {', '.join(get_args(Shape))}, got {self.shape!r}")
        lengths = {key: getattr(self, key) for key in ("share", "steps", "tokens")}
        given = {key: value for key, value in lengths.items() if value is not None}
        if len(given) != 1:
            raise ValueError(f"{where}: exactly one of share, steps and tokens must be set, got {lengths}")
        for key, value in given.items():
            if value < 0:
                raise ValueError(f"{where}: {key} must be at least 0, got {value}")
        warmups = {key: getattr(self, f"warmup_{key}") for key in ("steps", "tokens", "share")}
        given = {f"warmup_{key}": value for key, value in warmups.items() if value is not None}
        if len(given) > 1:
            raise ValueError(f"{where}: {' and '.join(given)} exclude each other, got {given}")
        for key, value in given.items():
            if value < 0:
                raise ValueError(f"{where}: {key} must be at least 0, got {value}")
        if self.warmup_share is not None and self.warmup_share > 1:
            raise ValueError(f"{where}: warmup_share must be in [0, 1], got {self.warmup_share}")
        if self.mask_ratio is not None and not 0 < self.mask_ratio <= 1:
            raise ValueError(f"{where}: mask_ratio must be in (0, 1], got {self.mask_ratio}")
        if not 0 <= self.final_share <= 1:
            raise ValueError(f"{where}: final_share must be in [0, 1], got {self.final_share}")
        if self.peak < 0:
            raise ValueError(f"{where}: peak must be at least 0, got {self.peak}")


@dataclass(frozen=True)
class ResolvedPhase:
    """A phase with its place in the run, all in optimizer steps: it trains steps ``start`` to ``stop - 1``."""

    phase: Phase
    start: int
    stop: int
    warmup_steps: int

    @property
    def name(self) -> str:
        """The phase's name."""
        return self.phase.name

    @property
    def steps(self) -> int:
        """Its length."""
        return self.stop - self.start

    @property
    def trains(self) -> str:
        """What it trains, with the mask ratio where the phase sets one (it then overrules the module's)."""
        ratio = self.phase.mask_ratio
        return self.phase.objective if ratio is None else f"{self.phase.objective}, mask ratio {ratio:g}"

    def factor(self, step: int) -> float:
        """Multiple of the optimizer's learning rate at an optimizer step of the run."""
        phase = self.phase
        return phase.peak * phase_factor(
            step - self.start, self.steps, self.warmup_steps, phase.shape, phase.final_share
        )


def resolve_phases(
    phases: Sequence[Phase], *, steps: int | None = None, tokens: float | None = None, slots_per_step: int | None = None
) -> list[ResolvedPhase]:
    """Turn shares and token budgets into optimizer steps, once.

    Args:
        phases: in order.
        steps: the budget that shares are of, in optimizer steps; or
        tokens: in slots.
        slots_per_step: slots x accumulation x ranks; needed where anything is in tokens.

    Raises:
        ValueError: names repeat, a share has no budget, a token budget no slots, or a phase is shorter than its
            warm-up.

    >>> phases = [Phase("a", "clm", share=1.0), Phase("b", "mlm", share=0.1)]
    >>> [(phase.start, phase.stop) for phase in resolve_phases(phases, steps=100)]
    [(0, 100), (100, 110)]
    """
    names = [phase.name for phase in phases]
    if not phases or len(set(names)) != len(names):
        raise ValueError(f"schedule.phases must be at least one, with names that differ, got {names}")

    def in_steps(value: float) -> int:
        if slots_per_step is None:
            raise ValueError(f"schedule: a budget in tokens needs batches of known size, got {value:g} tokens")
        # 0.1 * 30 must not become 4 steps of 1 for the sake of the last bit.
        return math.ceil(round(value / slots_per_step, 9))

    def length(phase: Phase) -> int:
        if phase.steps is not None:
            return phase.steps
        if phase.tokens is not None:
            return in_steps(phase.tokens)
        assert phase.share is not None
        if steps is not None:
            return math.ceil(round(phase.share * steps, 9))
        if tokens is None:
            raise ValueError(
                f"schedule phase {phase.name!r}: a share needs the schedule's steps or tokens, got neither"
            )
        return in_steps(phase.share * tokens)

    resolved: list[ResolvedPhase] = []
    start = 0
    for phase in phases:
        stop = start + length(phase)
        warmup = phase.warmup_steps or 0
        if phase.warmup_tokens is not None:
            warmup = in_steps(phase.warmup_tokens)
        elif phase.warmup_share is not None:
            warmup = round(phase.warmup_share * (stop - start))
        if warmup > stop - start > 0:
            raise ValueError(
                f"schedule phase {phase.name!r}: warm-up must fit in the phase's {stop - start} steps, got {warmup}"
            )
        resolved.append(ResolvedPhase(phase, start, stop, warmup))
        start = stop
    if start == 0:
        raise ValueError("schedule must have at least one step, got 0")
    return resolved


def phase_at(phases: Sequence[ResolvedPhase], step: int) -> ResolvedPhase:
    """The phase that trains an optimizer step; beyond the end, the last one that has steps."""
    running = [phase for phase in phases if phase.steps]
    return next((phase for phase in running if step < phase.stop), running[-1])


class ObjectiveSchedule(Callback):
    """Run phases one after another: objective, mask ratio and learning rate follow from ``trainer.global_step``.

    Works on any LightningModule with an attribute ``objective``. It sets the trainer's ``max_steps`` and validates at
    each phase's end, which `ExactResume` keeps in ``checkpoints/<phase>.ckpt``. Optimizer state and data position go on
    untouched through a switch.

    Args:
        phases: in order.
        steps: budget that shares are of, in optimizer steps; or
        tokens: in slots, turned into steps once: ceil(tokens / (slots x accumulation x ranks)).

    Raises:
        ValueError: a phase or budget is out of range, ``max_steps`` or ``max_epochs`` contradict the schedule, or the
            module has a learning-rate scheduler of its own.
        TypeError: the module has no ``objective``.
    """

    def __init__(
        self,
        phases: list[Phase],
        steps: int | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        super().__init__()
        if steps is not None and tokens is not None:
            raise ValueError(f"schedule.steps and schedule.tokens exclude each other, got {steps} and {tokens:g}")
        for key, value in (("steps", steps), ("tokens", tokens)):
            if value is not None and value <= 0:
                raise ValueError(f"schedule.{key} must be above 0, got {value}")
        self.phases = phases
        self.steps = steps
        self.tokens = tokens
        self.resolved: list[ResolvedPhase] = []
        self._peaks: list[list[float]] = []
        self._val_checks: tuple[Any, Any] | None = None
        self._step = 0
        if tokens is None and all(p.tokens is None and p.warmup_tokens is None for p in phases):
            resolve_phases(phases, steps=steps)  # Mistakes show when the object is made, where that is possible.

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole schedule."""
        return self.resolved[-1].stop

    def phase(self, step: int) -> ResolvedPhase:
        """The phase that trains an optimizer step."""
        return phase_at(self.resolved, step)

    def ending_at(self, step: int) -> ResolvedPhase | None:
        """The phase whose last optimizer step brought ``global_step`` to ``step``."""
        return next((phase for phase in self.resolved if phase.steps and phase.stop == step), None)

    def factor(self, phase: ResolvedPhase, step: int) -> float:
        """Multiple of the learning rate at an optimizer step: override for a curve of your own.

        Args:
            phase: the phase that trains the step.
            step: optimizer step of the run, in ``[phase.start, phase.stop)``.
        """
        return phase.factor(step)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if not hasattr(pl_module, "objective"):
            raise TypeError(
                f"{type(self).__name__} needs a module with an attribute `objective` that it can set to 'mlm' or "
                f"'clm'; add one to {type(pl_module).__name__}"
            )
        datamodule = getattr(trainer, "datamodule", None)
        slots = getattr(datamodule, "slots", None)
        slots_per_step = None if slots is None else slots * trainer.accumulate_grad_batches * trainer.world_size
        self.resolved = resolve_phases(self.phases, steps=self.steps, tokens=self.tokens, slots_per_step=slots_per_step)
        if any(phase.phase.mask_ratio is not None for phase in self.resolved) and not hasattr(pl_module, "mask_ratio"):
            raise TypeError(
                f"a phase with a mask_ratio needs a module with an attribute `mask_ratio`; add one to "
                f"{type(pl_module).__name__}"
            )
        if any(phase.phase.objective == "mlm" for phase in self.resolved) and hasattr(pl_module, "check_mlm"):
            pl_module.check_mlm()  # type: ignore[operator]
        named = next((phase for phase in self.resolved if phase.phase.mask_ratio is not None), None)
        if named is not None and getattr(pl_module, "streams", None):
            raise ValueError(
                f"schedule: phase {named.name!r} must have no mask ratio where model.streams have theirs (of a detour: "
                f"schedule.decay_mask_ratio null), got {named.phase.mask_ratio}"
            )
        self._own_mask_ratio = getattr(pl_module, "mask_ratio", None)
        self._claim_max_steps(trainer)
        self._check_max_epochs(trainer)
        rank_zero_info("schedule: " + ", ".join(f"{p.name} ({p.trains}) {p.start}-{p.stop}" for p in self.resolved))

    def _claim_max_steps(self, trainer: Trainer) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if trainer.max_steps not in (-1, self.total_steps):
            raise ValueError(
                f"trainer.max_steps must be left open or equal the schedule's {self.total_steps} steps, "
                f"got {trainer.max_steps}"
            )
        trainer.fit_loop.epoch_loop.max_steps = self.total_steps

    def _check_max_epochs(self, trainer: Trainer) -> None:
        if trainer.max_epochs in (None, -1):
            return
        # Not before it is needed: counting the packs of a large text plans the whole epoch.
        packs = getattr(getattr(trainer, "datamodule", None), "packs_per_epoch", None)
        if packs is None:
            return
        steps = math.ceil(packs / (trainer.accumulate_grad_batches * trainer.world_size)) * trainer.max_epochs
        if steps < self.total_steps:
            raise ValueError(
                f"trainer.max_epochs must not end the run before the schedule's {self.total_steps} steps: "
                f"{trainer.max_epochs} epochs are {steps} steps; leave it at -1"
            )

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.lr_scheduler_configs:
            name = type(trainer.lr_scheduler_configs[0].scheduler).__name__
            raise ValueError(
                "model.lr_scheduler must be unset beside a schedule, which sets the rate "
                f"(nor may configure_optimizers return one), got {name}"
            )
        self._val_checks = None
        # Before a checkpoint restores the optimizers: the learning rates of the configuration count, not the old ones.
        self._peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in trainer.optimizers]
        self._apply(trainer, pl_module)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._apply(trainer, pl_module)
        self._step = trainer.global_step

    def _apply(self, trainer: Trainer, pl_module: LightningModule) -> None:
        step = trainer.global_step
        now = self.phase(step)
        if pl_module.objective != now.phase.objective:
            pl_module.objective = now.phase.objective  # type: ignore[assignment]
        if self._own_mask_ratio is not None:
            pl_module.mask_ratio = now.phase.mask_ratio or self._own_mask_ratio  # type: ignore[assignment]
        for optimizer, peaks in zip(trainer.optimizers, self._peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * self.factor(now, step)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        ended = self.ending_at(trainer.global_step)
        # Only the micro-batch that brought the step: the next window's first ones see the same number.
        if ended is None or trainer.global_step == self._step:
            return
        if trainer.enable_validation:
            # Lightning validates where batch index and epoch divide by these.
            self._val_checks = (trainer.val_check_batch, trainer.check_val_every_n_epoch)
            trainer.val_check_batch, trainer.check_val_every_n_epoch = 1, 1

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._val_checks is not None and not trainer.sanity_checking:
            trainer.val_check_batch, trainer.check_val_every_n_epoch = self._val_checks
            self._val_checks = None

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"phases": [asdict(phase) for phase in self.resolved]}

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if not self.resolved:  # Not fitting: a validation may look at any checkpoint.
            return
        if checkpoint["global_step"] >= self.total_steps:
            raise ValueError(
                f"schedule must have steps beyond the checkpoint's {checkpoint['global_step']}, got {self.total_steps}"
            )
        saved = next((s for key, s in checkpoint["callbacks"].items() if key == self.state_key), None)
        for number, old in enumerate(saved["phases"] if saved else []):
            if old["stop"] > checkpoint["global_step"]:
                break
            new = asdict(self.resolved[number]) if number < len(self.resolved) else None
            if new != old:
                raise ValueError(
                    "schedule: the phases that a checkpoint has passed must stay as they were: "
                    f"{old['phase']['name']!r} was {_differences(old, new)}"
                )

    @property
    @override
    def state_key(self) -> str:
        # One schedule to a run: a detour may go on as any other schedule.
        return "ObjectiveSchedule"


def _differences(old: dict[str, Any], new: dict[str, Any] | None) -> str:
    """What differs between a phase as it was and as it is asked for now."""
    if new is None:
        return "part of the schedule, got fewer phases"
    before, after = ({**state, **state["phase"]} for state in (old, new))
    keys = [key for key in before if key != "phase" and before[key] != after[key]]
    return ", ".join(f"{key} {before[key]!r}, got {after[key]!r}" for key in keys)


class CLMDetour(ObjectiveSchedule):
    """The CLM detour: CLM for a budget, then MLM for a tenth of it, with the paper's learning rates.

    ``theta = MLM15(CLM(theta0, n), 0.1 n)``; its twin is ``CLMDetour(detour="mlm", detour_mask_ratio=0.3)``. The rate
    warms up, stays, and falls by 1-sqrt to 10 % in the decay. Optimizer state is kept at the switch.

    Args:
        steps: the detour's budget n in optimizer steps; the decay comes on top of it; or
        tokens: in slots.
        decay_share: length of the decay as a share of n, in [0, 1).
        decay_mask_ratio: mask ratio of the decay, in (0, 1]; None keeps the module's, as one with ``streams`` needs.
        final_share: share of the peak at the decay's end.
        warmup_steps: of the detour; None with a budget in steps is a hundredth of it.
        warmup_tokens: the same in slots; None with a budget in tokens is 100M, or a hundredth of a budget below 10B.
        detour: objective of the first phase: "clm", or "mlm" for the twin.
        detour_mask_ratio: mask ratio of an MLM detour.
        head_warmup_steps: MLM steps before the detour, for a model whose LM head is new.
        head_warmup_peak: their learning rate, times the optimizer's.
    """

    def __init__(
        self,
        steps: int | None = None,
        tokens: Tokens | None = None,
        decay_share: float = 0.1,
        decay_mask_ratio: float | None = 0.15,
        final_share: float = 0.1,
        warmup_steps: int | None = None,
        warmup_tokens: Tokens | None = None,
        detour: Objective = "clm",
        detour_mask_ratio: float = 0.3,
        head_warmup_steps: int = 0,
        head_warmup_peak: float = 1.0,
    ) -> None:
        if (steps is None) == (tokens is None):
            raise ValueError(
                f"schedule: exactly one of steps and tokens must be set (the other null), got {steps} and {tokens}"
            )
        for key, value in (("steps", steps), ("tokens", tokens)):
            if value is not None and value <= 0:
                raise ValueError(f"schedule.{key} must be above 0, got {value}")
        if not 0 <= decay_share < 1:
            raise ValueError(f"schedule.decay_share must be in [0, 1), got {decay_share}")
        if head_warmup_steps < 0:
            raise ValueError(f"schedule.head_warmup_steps must be at least 0, got {head_warmup_steps}")
        if warmup_steps is None and warmup_tokens is None:
            if steps is not None:
                warmup_steps = steps // 100
            elif tokens is not None:
                warmup_tokens = min(100e6, tokens / 100)
        name = "detour" if detour == "clm" else "twin"
        first = Phase(
            name,
            detour,
            share=1.0,
            mask_ratio=detour_mask_ratio if detour == "mlm" else None,
            warmup_steps=warmup_steps,
            warmup_tokens=warmup_tokens,
        )
        phases = [first]
        if decay_share > 0:
            phases.append(
                Phase(
                    "decay",
                    "mlm",
                    share=decay_share,
                    mask_ratio=decay_mask_ratio,
                    shape="one_minus_sqrt",
                    final_share=final_share,
                )
            )
        if head_warmup_steps:
            warm = replace(first, name="head_warmup", objective="mlm", share=None, steps=head_warmup_steps)
            phases.insert(
                0, replace(warm, mask_ratio=None, warmup_steps=None, warmup_tokens=None, peak=head_warmup_peak)
            )
        super().__init__(phases, steps=steps, tokens=tokens)


def find_schedule(trainer: Trainer) -> ObjectiveSchedule | None:
    """The trainer's schedule, for callbacks that act by phases."""
    return next((c for c in trainer.callbacks if isinstance(c, ObjectiveSchedule)), None)  # type: ignore[attr-defined]
