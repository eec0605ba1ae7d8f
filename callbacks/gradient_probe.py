"""Measure the gradient that each mask stream, and each loss term, sends into the shared encoder.

What a reproduction of UltraBERT (Park, Lee, Kang 2026) has to record: heads of their own do not keep two streams'
gradients from cancelling in the encoder they share, (1, 0) + (-1, 1) = (0, 1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from lit_encoders.models.layer_range import LayerRange


def gradient_products(gradients: Mapping[str, Sequence[Tensor]]) -> Tensor:
    """Inner products of gradients, float64 (S, S), in the order of the names.

    Args:
        gradients: of each stream, the tensors of its gradient, in the same order and shapes.

    >>> gradient_products({"a": [torch.tensor([1.0, 0.0])], "b": [torch.tensor([-1.0, 1.0])]}).tolist()
    [[1.0, -1.0], [-1.0, 2.0]]
    """
    names = list(gradients)
    total = torch.zeros(len(names), len(names), dtype=torch.float64)
    for tensors in zip(*gradients.values(), strict=True):
        rows = torch.stack([tensor.detach().double().flatten() for tensor in tensors])
        total += (rows @ rows.T).cpu()
    return total


def compare(names: Sequence[str], products: Tensor) -> dict[str, float]:
    """Norm of each gradient, and cosine of each pair, 0 where one is zero.

    >>> compare(["a", "b"], torch.tensor([[1.0, -1.0], [-1.0, 2.0]]))
    {'a/norm': 1.0, 'b/norm': 1.4142135623730951, 'a~b/cosine': -0.7071067811865475}
    """
    norms = [math.sqrt(float(products[i, i])) for i in range(len(names))]
    found = {f"{name}/norm": norm for name, norm in zip(names, norms, strict=True)}
    for i, first in enumerate(names):
        for j in range(i + 1, len(names)):
            both = norms[i] * norms[j]
            found[f"{first}~{names[j]}/cosine"] = float(products[i, j]) / both if both else 0.0
    return found


class GradientProbe(Callback):
    """Every N optimizer steps, log norms and cosines of the streams' gradients on the encoder.

    Each micro-batch of such a step is read once more, and its graph walked once per stream and term; other steps cost
    nothing. Gradients are those of the step: summed over its micro-batches and ranks and divided as the step's are.
    Needs a `LitEncoder` with ``streams``; FSDP2 is not supported.

    Logs ``gradient/<stream>/norm``, ``gradient/<stream>.<term>/norm`` where a teacher is asked,
    ``gradient/<a>~<b>/cosine``, and the same for each range under ``gradient/<range>/``.

    Args:
        every_n_steps: optimizer steps between two measurements, at least 1; with a logger a multiple of
            ``trainer.log_every_n_steps``.
        layers: ranges to look at beside the whole encoder (its layers and embeddings), such as ["0:8", "embeddings"].
        layers_path: dotted name of the list of layers, where it cannot be found.

    Raises:
        ValueError: a range matches nothing, or measurements would fall between two logged steps.
        TypeError: the module has no streams.
        NotImplementedError: the parameters are sharded.
    """

    def __init__(
        self, every_n_steps: int = 100, layers: str | list[str] | None = None, layers_path: str | None = None
    ) -> None:
        super().__init__()
        if every_n_steps < 1:
            raise ValueError(f"GradientProbe.every_n_steps must be at least 1, got {every_n_steps}")
        self.every_n_steps = every_n_steps
        self.ranges = [] if layers is None else LayerRange(layers).texts
        self.layers_path = layers_path
        self._parameters: dict[str, nn.Parameter] = {}
        self._sums: dict[str, list[Tensor]] = {}
        self._divisor = 0.0
        self._logged: set[str] = set()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if not getattr(pl_module, "streams", None):
            raise TypeError(f"GradientProbe needs a LitEncoder with streams, got {type(pl_module).__name__} without")
        often = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if trainer.loggers and self.every_n_steps % often:
            raise ValueError(
                f"GradientProbe.every_n_steps must be a multiple of trainer.log_every_n_steps ({often}), "
                f"got {self.every_n_steps}"
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if any(isinstance(child, FSDPModule) for child in pl_module.modules()):
            raise NotImplementedError("GradientProbe cannot look into sharded parameters: use DDP or one device")
        encoder = LayerRange(["all", "embeddings"]).parameters(pl_module, self.layers_path)
        self._parameters = {name: parameter for name, parameter in encoder.items() if parameter.requires_grad}
        self._names = {
            text: [n for n in LayerRange(text).parameters(pl_module, self.layers_path) if n in self._parameters]
            for text in self.ranges
        }

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.global_step + 1) % self.every_n_steps or pl_module.objective != "mlm":
            return
        with trainer.precision_plugin.forward_context():
            parts, divisor = pl_module.loss_parts(batch)
        parameters = list(self._parameters.values())
        for number, (name, total) in enumerate(parts.items()):
            # Not backward(): that would add to the step's own gradients, and wake DDP.
            found = torch.autograd.grad(total, parameters, retain_graph=number + 1 < len(parts), allow_unused=True)
            dense = [torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True)]
            before = self._sums.get(name)
            self._sums[name] = dense if before is None else [a.add_(b) for a, b in zip(before, dense, strict=True)]
        self._divisor += divisor

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        # Lightning would go on logging the last measurement at every step.
        for name in self._logged:
            if trainer._results is not None:
                trainer._results.pop(f"on_before_optimizer_step.{name}", None)
        self._logged = set()
        if not self._sums:
            return
        sums, divisor = self._sums, torch.tensor(self._divisor, dtype=torch.float64, device=pl_module.device)
        self._sums, self._divisor = {}, 0.0
        if trainer.world_size > 1:
            torch.distributed.all_reduce(divisor)
            for tensor in (tensor for tensors in sums.values() for tensor in tensors):
                torch.distributed.all_reduce(tensor)
        scale = max(float(divisor), 1e-30)
        found = {f"gradient/{key}": value for key, value in self._compare(sums, scale).items()}
        self._logged = set(found)
        pl_module.log_dict(found)

    def _compare(self, sums: Mapping[str, list[Tensor]], scale: float) -> dict[str, float]:
        found = compare(list(sums), gradient_products(sums) / scale**2)
        places = {name: number for number, name in enumerate(self._parameters)}
        for text, names in self._names.items():
            part = {key: [tensors[places[name]] for name in names] for key, tensors in sums.items()}
            of_range = compare(list(sums), gradient_products(part) / scale**2)
            found |= {f"{text}/{key}": value for key, value in of_range.items()}
        return found
