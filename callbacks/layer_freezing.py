"""Hold layer ranges still: for a whole run, for named phases, or for windows of steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lit_encoders.callbacks.objective_schedule import find_schedule
from lit_encoders.models.layer_range import LayerMap, LayerRange, map_layers
from lit_encoders.models.sharding import fill_state_


@dataclass(frozen=True)
class FreezeWindow:
    """Layers and when they are frozen.

    Attributes:
        layers: a range such as "0:8" (0-based, half-open), "all", "embeddings", "final_norm", "head", or several.
        phases: names of the schedule's phases in which they are frozen.
        steps: optimizer steps in which they are frozen, as a Python slice: "100:200", ":500". With neither, they are
            frozen for the whole run.
    """

    layers: str | list[str]
    phases: list[str] | None = None
    steps: str | None = None

    def __post_init__(self) -> None:
        LayerRange(self.layers)
        if self.phases is not None and self.steps is not None:
            raise ValueError(
                f"LayerFreezing.phases and LayerFreezing.steps exclude each other, got {self.phases} and {self.steps!r}"
            )
        if self.steps is not None:
            parse_steps(self.steps)

    @property
    def when(self) -> str:
        """In words: the whole run, phases, or steps."""
        if self.phases is not None:
            return ", ".join(self.phases)
        return "the whole run" if self.steps is None else f"steps {self.steps}"

    @property
    def always(self) -> bool:
        """Whether it lasts for the whole run."""
        return self.phases is None and self.steps is None


def parse_steps(text: str) -> tuple[int, float]:
    """Read a window of optimizer steps, ``start <= step < stop``.

    Raises:
        TypeError: a number, as YAML makes of an unquoted window.
        ValueError: not a window, or an empty one.

    >>> parse_steps("100:200"), parse_steps(":50")
    ((100, 200), (0, 50))
    """
    if not isinstance(text, str):
        raise TypeError(f'LayerFreezing.steps must be text in quotes, such as "100:200", got {text}')
    start, colon, stop = text.partition(":")
    if not colon or not all(bound.isdigit() or not bound for bound in (start, stop)):
        raise ValueError(f"LayerFreezing.steps must be like '100:200' or ':500', got {text!r}")
    window = int(start or 0), int(stop) if stop else float("inf")
    if window[0] >= window[1]:
        raise ValueError(f"LayerFreezing.steps must hold at least one step, got {text!r}")
    return window


def drop_gradients_(parameters: Iterable[nn.Parameter]) -> None:
    """Take the gradients away, so that an optimizer moves neither weights nor moments.

    A gradient of zero would not do: weight decay and running moments still move a weight.
    """
    for parameter in parameters:
        parameter.grad = None


def tie_messages(layer_map: LayerMap, frozen: Iterable[str]) -> list[str]:
    """Say what becomes of weights that are tied: they are one tensor, and move or rest as one."""
    frozen = set(frozen)
    lines = []
    for name, listed in layer_map.ties.items():
        tied = f"{name} is {listed} (tied)"
        if listed in frozen:
            lines.append(f"{tied}: frozen with it")
        elif layer_map.places[listed] == "embeddings" and any(layer_map.places[n] == "head" for n in frozen):
            lines.append(f"{tied}: it trains, since only the rest of the head is frozen; name embeddings to freeze it")
    return lines


class LayerFreezing(Callback):
    """Freeze layer ranges: nothing of a frozen weight or of its moments moves, and both go on where they stood.

    Ranges that are frozen for the whole run need no gradient, which saves their part of the backward pass. In phases
    and windows the gradients are dropped before the optimizer step, so that processes agree and nothing is rebuilt.
    Works on any LightningModule whose blocks stand in one ``ModuleList``. A decoder that is tied to the embeddings is
    frozen with them, and not with the head: they are one tensor, and stand with the embeddings.

    Logs ``train/frozen_parameters`` and ``train/trainable_parameters`` with the trainer's other metrics.

    Args:
        layers: a range such as "0:8" (0-based, half-open), "all", "embeddings", "final_norm", "head", or several.
        phases: names of the schedule's phases in which they are frozen.
        steps: optimizer steps in which they are frozen, such as "100:200" or ":500"; with neither, the whole run.
        windows: several of these, such as one range after the other for gradual unfreezing; in place of the above.
        layers_path: dotted name of the list of blocks, where it cannot be found.

    Raises:
        ValueError: a range matches nothing, a phase is not in the schedule, or everything would be frozen.
    """

    def __init__(
        self,
        layers: str | list[str] | None = None,
        phases: list[str] | None = None,
        steps: str | None = None,
        windows: list[FreezeWindow] | None = None,
        layers_path: str | None = None,
    ) -> None:
        super().__init__()
        if (layers is None) == (windows is None):
            raise ValueError(f"LayerFreezing needs exactly one of layers and windows, got {layers} and {windows}")
        if windows is not None and (phases is not None or steps is not None):
            raise ValueError("LayerFreezing.windows have phases and steps of their own, got some beside them")
        self.windows = [FreezeWindow(layers, phases, steps)] if layers is not None else list(windows or [])
        if not self.windows:
            raise ValueError("LayerFreezing.windows must be at least one, got none")
        self.layers_path = layers_path
        # Of each window its parameters by name, once the module has any.
        self._chosen: list[dict[str, nn.Parameter]] = []
        self._active: list[int] = []
        # Parameters that trained before, and need no gradient while the run lasts.
        self._held: list[nn.Parameter] = []

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(windows=[(w.layers, w.phases, w.steps) for w in self.windows])

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        # Before DDP wraps the module and counts the gradients it waits for; Lightning calls it again to no effect.
        call._call_configure_model(trainer)
        self._chosen = []
        try:
            self._choose(pl_module)
        except ValueError:
            # A module may make its layers in its own setup(), which comes after this one.
            if not is_overridden("setup", pl_module):
                raise
            return
        always = [c for window, c in zip(self.windows, self._chosen, strict=True) if window.always]
        self._held = [p for chosen in always for p in chosen.values() if p.requires_grad]
        for parameter in self._held:
            parameter.requires_grad_(False)

    def _release(self) -> None:
        """The module may be trained again, by a run that freezes nothing."""
        for parameter in self._held:
            parameter.requires_grad_(True)
        self._held = []

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._release()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._release()

    def _choose(self, module: LightningModule) -> None:
        layer_map, named = map_layers(module, self.layers_path), dict(module.named_parameters())
        total = sum(parameter.numel() for parameter in named.values())
        # What another such callback froze for the whole run does not train either.
        trains = {name for name, parameter in named.items() if parameter.requires_grad}
        names = [LayerRange(window.layers).names(layer_map) for window in self.windows]
        trains -= {name for window, mine in zip(self.windows, names, strict=True) if window.always for name in mine}
        chosen_by_window = [{name: named[name] for name in mine} for mine in names]
        for window, chosen in zip(self.windows, chosen_by_window, strict=True):
            if trains <= chosen.keys():
                raise ValueError(f"LayerFreezing.layers must leave something to train, got {window.layers}")
            frozen = sum(parameter.numel() for parameter in chosen.values())
            rank_zero_info(f"frozen in {window.when}: {LayerRange(window.layers)} ({frozen:,} of {total:,} parameters)")
            for line in tie_messages(layer_map, chosen):
                rank_zero_info(line)
        self._chosen = chosen_by_window

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        schedule = find_schedule(trainer)
        known = [] if schedule is None else [phase.name for phase in schedule.resolved]
        for name in (name for window in self.windows for name in window.phases or []):
            if name not in known:
                raise ValueError(
                    f"LayerFreezing.phases must name phases of the schedule ({', '.join(known)}), got {name!r}"
                )
        if not self._chosen:
            self._choose(pl_module)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        frozen = {id(p): p for chosen in self._chosen for p in chosen.values()}
        if any(isinstance(parameter, DTensor) for parameter in frozen.values()):
            for optimizer in trainer.optimizers:
                fill_state_(optimizer, frozen.values())

    def active(self, trainer: Trainer) -> list[int]:
        """Which windows freeze at the step to come, by number."""
        schedule, step = find_schedule(trainer), trainer.global_step
        phase = None if schedule is None else schedule.phase(step).name
        found = []
        for number, window in enumerate(self.windows):
            if window.phases is not None:
                frozen = phase in window.phases
            else:
                start, stop = parse_steps(window.steps or ":")
                frozen = start <= step < stop
            if frozen:
                found.append(number)
        return found

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._active = self.active(trainer)
        for number in self._active:
            drop_gradients_(self._chosen[number].values())
        if (trainer.global_step + 1) % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            self._log(trainer, pl_module)

    def _log(self, trainer: Trainer, module: LightningModule) -> None:
        """Count what is frozen at this step, by all such callbacks together: the last of them logs."""
        every = [c for c in trainer.callbacks if isinstance(c, LayerFreezing)]  # type: ignore[attr-defined]
        if every[-1] is not self:
            return
        parts = [callback._chosen[number] for callback in every for number in callback._active]
        frozen = {id(parameter) for part in parts for parameter in part.values()}
        # What the module itself keeps from training (a teacher) counts as frozen too.
        sizes = [(p.numel(), id(p) in frozen or not p.requires_grad) for p in module.parameters()]
        module.log_dict(
            {
                "train/frozen_parameters": float(sum(size for size, rests in sizes if rests)),
                "train/trainable_parameters": float(sum(size for size, rests in sizes if not rests)),
            }
        )
