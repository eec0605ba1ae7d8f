"""L2-SP: pull weights toward where they started.

Sources: Li, Grandvalet, Davoine (2018), arXiv:1802.01483, for the penalty (their form has a factor 1/2); Ahuja, Blevins
(2026), arXiv:2606.00284, for strengths by layer range (a sum without the factor). Applying a penalty apart from the
adaptive step: Loshchilov, Hutter (2019), arXiv:1711.05101.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lit_encoders.callbacks.anchored import START, AnchoredCallback
from lit_encoders.models.layer_range import LayerRange
from lit_encoders.models.sharding import local, sum_rows

Form = Literal["sum", "half"]
Mode = Literal["gradient", "decoupled"]
# Everything that no other range of the same callback names.
REST = "rest"


@torch.no_grad()
def add_l2sp_grad_(
    parameters: Mapping[str, nn.Parameter], anchors: Mapping[str, Tensor], slopes: Mapping[str, float]
) -> None:
    """Add the gradient of the penalty, ``slope * (w - w0)``, in place, computed in float32 or better.

    Args:
        parameters: name -> weight ``w``, any shape; one without a gradient (frozen, or not used) is left alone.
        anchors: name -> start ``w0``, this process's piece of it.
        slopes: name -> ``2 * strength`` in the form "sum", ``strength`` in the form "half".

    >>> w = nn.Parameter(torch.tensor([3.0])); w.grad = torch.zeros(1)
    >>> add_l2sp_grad_({"w": w}, {"w": torch.tensor([1.0])}, {"w": 2 * 0.5}); w.grad
    tensor([2.])
    """
    for name, parameter in parameters.items():
        if parameter.grad is not None and slopes[name]:
            gradient, weight = local(parameter.grad), local(parameter)
            gradient.add_(_distance(weight, anchors[name]).to(gradient.dtype), alpha=slopes[name])


@torch.no_grad()
def pull_(parameters: Mapping[str, nn.Parameter], anchors: Mapping[str, Tensor], rates: Mapping[str, float]) -> None:
    """Move weights toward their start, ``w -= rate * (w - w0)``, in place, computed in float32 or better.

    Args:
        parameters: name -> weight ``w``, any shape.
        anchors: name -> start ``w0``, this process's piece of it.
        rates: name -> learning rate times slope.

    >>> w = nn.Parameter(torch.tensor([3.0])); pull_({"w": w}, {"w": torch.tensor([1.0])}, {"w": 0.5}); w.item()
    2.0
    """
    for name, parameter in parameters.items():
        if rates[name]:
            weight = local(parameter)
            apart = _distance(weight, anchors[name])
            weight.copy_(weight.to(apart.dtype).sub(apart, alpha=rates[name]))


@torch.no_grad()
def squared_distances(parameters: Mapping[str, nn.Parameter], anchors: Mapping[str, Tensor]) -> Tensor:
    """Sums of ``(w - w0)^2`` and of ``w0^2`` over whole tensors and all processes, float64 (parameters, 2).

    Args:
        parameters: name -> weight ``w``.
        anchors: name -> start ``w0``, this process's piece of it.
    """
    rows = []
    for name, parameter in parameters.items():
        start = anchors[name].to(local(parameter).device)
        apart = _distance(local(parameter), start).double()
        rows.append(torch.stack([apart.square().sum(), start.double().square().sum()]))
    return sum_rows(torch.stack(rows), list(parameters.values()))


def _distance(weight: Tensor, anchor: Tensor) -> Tensor:
    # In bfloat16 small distances would vanish, and float64 weights would lose half of their digits in float32.
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return weight.detach().to(dtype) - anchor.to(weight.device, non_blocking=True).to(dtype)


class L2SP(AnchoredCallback):
    """Anchor layer ranges to their start, once per optimizer step and before clipping.

    The loss is left alone: the gradient of ``strength * sum (w - w0)^2`` is added once all micro-batches and ranks are
    in, so it depends on neither. Frozen weights are not touched. Weight decay stays as the module has it; exempt the
    anchored ranges with its ``no_decay``, where they should be pulled to their start alone. A weight that is tied
    counts once.

    Logs, with the trainer's other metrics, ``l2sp/penalty``, and for each range ``l2sp/<range>/penalty`` and
    ``l2sp/<range>/drift`` (``||w - w0|| / ||w0||``).

    Args:
        strength: per squared weight, at least 0: for all that trains, or by layer range, with "rest" for what no
            other range names; several ranges in one key have commas between them.
        form: "sum" is ``strength * sum d^2``, with gradient ``2 * strength * d``; "half" has half of both.
        mode: "gradient" adds to the gradient, which Adam then rescales; "decoupled" moves the weights after the step,
            by learning rate times the penalty's gradient.
        base: "start" of the run, or the folder, hub name or checkpoint of the model to be pulled toward.
        device: where the anchors are kept: "cpu" saves the device's memory; None beside the weights.
        layers_path: dotted name of the list of layers, where it cannot be found.

    Raises:
        ValueError: a strength is negative, a range matches nothing or overlaps another's, or the base is not the one
            in the checkpoint.
    """

    def __init__(
        self,
        strength: float | dict[str, float],
        form: Form = "sum",
        mode: Mode = "gradient",
        base: str = START,
        device: str | None = None,
        layers_path: str | None = None,
    ) -> None:
        super().__init__(base, device, layers_path)
        by_range = strength if isinstance(strength, dict) else {REST: strength}
        if not by_range:
            raise ValueError("L2SP.strength must name at least one range, got none")
        for text, value in by_range.items():
            if text != REST:
                LayerRange(text)
            if not isinstance(value, int | float):
                raise TypeError(f"L2SP.strength must be a number, got {value!r} for {text!r}")
            if not value >= 0:
                raise ValueError(f"L2SP.strength must be at least 0, got {value} for {text!r}")
        for key, given, kind in (("form", form, Form), ("mode", mode, Mode)):
            if given not in get_args(kind):
                raise ValueError(f"L2SP.{key} must be one of {', '.join(get_args(kind))}, got {given!r}")
        self.strength = by_range
        self.form = form
        self.mode = mode
        self.ranges: dict[str, list[str]] = {}
        self._hooks: list[Any] = []

    @property
    @override
    def state_key(self) -> str:
        # Not by the base: another one has to be noticed, and the same may lie elsewhere now.
        return self._generate_state_key(strength=sorted(self.strength))

    @override
    def choose(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, nn.Parameter]:
        trains = {name: parameter for name, parameter in pl_module.named_parameters() if parameter.requires_grad}
        self.ranges = {}
        for text in (text for text in self.strength if text != REST):
            names = LayerRange(text).parameters(pl_module, self.layers_path)
            taken = {name: other for other, chosen in self.ranges.items() for name in chosen}
            twice = [name for name in names if name in taken]
            if twice:
                raise ValueError(f"L2SP.strength must not name a weight twice, got {taken[twice[0]]!r} and {text!r}")
            self.ranges[text] = [name for name in names if name in trains]
        if REST in self.strength:
            taken = {name: text for text, chosen in self.ranges.items() for name in chosen}
            self.ranges[REST] = [name for name in trains if name not in taken]
        mine = {name for names in self.ranges.values() for name in names}
        if not mine:
            raise ValueError(f"L2SP.strength must name weights that train, got {', '.join(self.strength)}")
        others = [c for c in trainer.callbacks if isinstance(c, L2SP) and c is not self]  # type: ignore[attr-defined]
        for name in (name for other in others for names in other.ranges.values() for name in names):
            if name in mine:
                raise ValueError(f"L2SP must anchor a weight once, got two of them with overlapping ranges ({name})")
        return {name: trains[name] for name in trains if name in mine}

    @property
    def _doubling(self) -> float:
        return 2.0 if self.form == "sum" else 1.0

    def _slopes(self) -> dict[str, float]:
        return {n: self._doubling * self.strength[text] for text, names in self.ranges.items() for n in names}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        ranges = ", ".join(f"{text} {self.strength[text]:g}" for text in self.ranges)
        weights = sum(parameter.numel() for parameter in self.parameters.values())
        rank_zero_info(f"L2-SP toward {self.base!r}: {ranges} ({weights:,} weights, form {self.form}, {self.mode})")
        if self.mode == "decoupled":
            # The moment right after the step, with its learning rate, and not at all where a step is skipped.
            self._hooks = [optimizer.register_step_post_hook(self._after_step) for optimizer in trainer.optimizers]

    def _of(self, optimizer: Optimizer) -> dict[str, nn.Parameter]:
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return {name: parameter for name, parameter in self.parameters.items() if id(parameter) in own}

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if (trainer.global_step + 1) % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            pl_module.log_dict(self.measure())
        if self.mode == "gradient":
            add_l2sp_grad_(self._of(optimizer), self.anchors, self._slopes())

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        moved = {name: parameter for name, parameter in self._of(optimizer).items() if parameter.grad is not None}
        slopes = self._slopes()
        rates = {id(p): float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}
        pull_(moved, self.anchors, {name: rates[id(p)] * slopes[name] for name, p in moved.items()})

    def measure(self) -> dict[str, float]:
        """Penalty (nats) and drift of each range, as logged; on a GPU this waits for the device."""
        sums = dict(zip(self.parameters, squared_distances(self.parameters, self.anchors).tolist(), strict=True))
        found = {"l2sp/penalty": 0.0}
        for text, names in self.ranges.items():
            apart, start = (sum(sums[name][place] for name in names) for place in (0, 1))
            penalty = self._doubling / 2 * self.strength[text] * apart
            found["l2sp/penalty"] += penalty
            found[f"l2sp/{text}/penalty"] = penalty
            found[f"l2sp/{text}/drift"] = (apart / start) ** 0.5 if start else 0.0
        return found

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        remove_hooks(self._hooks)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        remove_hooks(self._hooks)


def remove_hooks(hooks: list[Any]) -> None:
    """Take hooks off again and forget them."""
    for hook in hooks:
        hook.remove()
    hooks.clear()
