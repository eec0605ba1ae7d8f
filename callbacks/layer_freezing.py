"""Hold layer ranges still, for named phases of a run or all of it."""

from __future__ import annotations

from collections.abc import Iterable

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lit_encoders.callbacks.objective_schedule import find_schedule
from lit_encoders.models.layer_range import select_parameters


def drop_gradients_(parameters: Iterable[nn.Parameter]) -> None:
    """Take the gradients away, so that an optimizer moves neither weights nor moments.

    A gradient of zero would not do: weight decay and running moments still move a weight.
    """
    for parameter in parameters:
        parameter.grad = None


class LayerFreezing(Callback):
    """Freeze layer ranges by dropping their gradients before the optimizer step.

    Frozen weights and their moments stay bit-equal; they go on exactly where they stood once the phase is over. Works
    on any LightningModule whose blocks stand in one ``ModuleList``. A tied decoder is frozen with the embeddings: they
    are one tensor.

    Args:
        layers: a range such as "0:8" (0-based, half-open), "all", "embeddings", or several.
        phases: names of the schedule's phases in which they are frozen; None for the whole run.
        layers_path: dotted name of the list of blocks, where it cannot be found.

    Raises:
        ValueError: a range matches nothing, a phase is not in the schedule, or everything would be frozen.
    """

    def __init__(
        self, layers: str | list[str], phases: list[str] | None = None, layers_path: str | None = None
    ) -> None:
        super().__init__()
        self.layers = [layers] if isinstance(layers, str | int) else layers
        self.phases = phases
        self.layers_path = layers_path
        self._parameters: list[nn.Parameter] = []

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(layers=self.layers, phases=self.phases)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        schedule = find_schedule(trainer)
        if self.phases is not None:
            known = [] if schedule is None else [phase.name for phase in schedule.resolved]
            unknown = [name for name in self.phases if name not in known]
            if unknown:
                raise ValueError(
                    f"LayerFreezing.phases must name phases of the schedule ({', '.join(known)}), got {unknown[0]!r}"
                )
        self._parameters = list(select_parameters(pl_module, self.layers, self.layers_path).values())
        frozen = sum(parameter.numel() for parameter in self._parameters)
        total = sum(parameter.numel() for parameter in pl_module.parameters() if parameter.requires_grad)
        if frozen >= total:
            raise ValueError(f"LayerFreezing.layers must leave something to train, got {self.layers}")
        when = "the whole run" if self.phases is None else ", ".join(self.phases)
        rank_zero_info(f"frozen in {when}: {', '.join(self.layers)} ({frozen:,} of {total:,} parameters)")

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self.phases is not None:
            schedule = find_schedule(trainer)
            if schedule is None or schedule.phase(trainer.global_step).name not in self.phases:
                return
        drop_gradients_(self._parameters)
