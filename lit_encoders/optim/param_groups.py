"""Which weights decay: matrices do, vectors (norms and biases) do not."""

from __future__ import annotations

from typing import Any

from torch import nn


def decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split trainable parameters by dimension: names of norms differ between models, dimensions do not.

    Args:
        module: whose parameters; a tied one counts once.
        weight_decay: for parameters of two dimensions and more, embeddings included.

    Returns:
        The decaying group and the one with 0; an empty one is left out.

    >>> [len(group["params"]) for group in decay_groups(nn.Linear(2, 2), 0.1)]
    [1, 1]
    """
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
