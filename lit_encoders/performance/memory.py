"""Bytes that a run holds on each device, and those of what it writes. Activations are not estimated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass(frozen=True)
class DeviceBytes:
    """What stands on one device from the first step to the last.

    Attributes:
        weights: parameters, a tied one once.
        gradients: of those that train.
        moments: what the optimizer keeps of them.
        anchors: where weights started, for callbacks that look back to it.
        teacher: its parameters.
    """

    weights: int
    gradients: int
    moments: int
    anchors: int = 0
    teacher: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.moments + self.anchors + self.teacher


def piece_bytes(tensor: Tensor, ranks: int = 1) -> int:
    """Bytes of the largest piece of a tensor: FSDP2 deals out its rows, as many to each rank, rounded up.

    >>> piece_bytes(torch.zeros(5, 2), ranks=2), piece_bytes(torch.zeros(5, 2))
    (24, 40)
    """
    rows = tensor.shape[0] if tensor.ndim else 1
    return math.ceil(rows / ranks) * math.prod(tensor.shape[1:]) * tensor.element_size()


def bytes_per_device(
    parameters: Iterable[nn.Parameter],
    *,
    moments: float = 2.0,
    anchors: Iterable[Tensor] = (),
    teacher: Iterable[Tensor] = (),
    ranks: int = 1,
    shard_teacher: bool = False,
) -> DeviceBytes:
    """Add up what one device holds; on one device, and under DDP on each, that is everything.

    Args:
        parameters: of the model, on any device (meta too), a tied one once.
        moments: numbers that the optimizer keeps per trainable weight, in the weight's type; 2 of AdamW, whose one
            step count per tensor (4 bytes) is left out.
        anchors: the parameters of which a copy is kept on the device.
        teacher: its parameters.
        ranks: that FSDP2 shards over; 1 where nothing is sharded.
        shard_teacher: whether the teacher is sharded too.

    >>> held = bytes_per_device(nn.Linear(3, 2).parameters(), ranks=2)
    >>> held.weights, held.gradients, held.moments, held.total
    (16, 16, 32, 64)
    """
    parameters = list(parameters)
    trained = sum(piece_bytes(parameter, ranks) for parameter in parameters if parameter.requires_grad)
    return DeviceBytes(
        weights=sum(piece_bytes(parameter, ranks) for parameter in parameters),
        gradients=trained,
        moments=round(moments * trained),
        anchors=sum(piece_bytes(anchor, ranks) for anchor in anchors),
        teacher=sum(piece_bytes(weight, ranks if shard_teacher else 1) for weight in teacher),
    )


def checkpoint_bytes(parameters: Iterable[nn.Parameter], moments: float = 2.0) -> int:
    """Bytes of a training checkpoint, a file or the pieces of a sharded one: weights and moments.

    Args:
        parameters: of the model, a tied one once.
        moments: numbers that the optimizer keeps per trainable weight.
    """
    held = bytes_per_device(parameters, moments=moments)
    return held.weights + held.moments


def export_bytes(parameters: Iterable[nn.Parameter], dtype: torch.dtype | None = None) -> int:
    """Bytes of the weights in an export; the files of the tokenizer come beside them.

    Args:
        parameters: of the Hugging Face model, without heads that are no part of it; a tied one once.
        dtype: that they are stored in, None for their own.
    """
    return sum(p.numel() * (p.dtype if dtype is None else dtype).itemsize for p in parameters)


def moments_per_weight(optimizer: Callable[[Sequence[dict[str, Any]]], Optimizer] | None) -> float:
    """Find out what an optimizer keeps per weight, from one step on a small matrix.

    Args:
        optimizer: makes it from parameter groups; None for AdamW.

    >>> moments_per_weight(None), moments_per_weight(lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    (2.0, 1.0)
    """
    if optimizer is None:
        return 2.0
    weight = nn.Parameter(torch.zeros(64, 64))
    weight.grad = torch.zeros_like(weight)
    made = optimizer([{"params": [weight], "weight_decay": 0.0, "lr_scale": 1.0}])
    made.step(lambda: 0.0)  # Some ask for the loss again.
    kept = [value for value in made.state[weight].values() if isinstance(value, Tensor)]
    # Step counts are no moments.
    return sum(value.nbytes for value in kept if value.numel() > 1) / weight.nbytes
