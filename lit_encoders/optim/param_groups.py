"""Which weights decay, and which layers learn slower: parameter groups for any optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from lit_encoders.models.layer_range import LayerRange, map_layers


def layer_scales(module: nn.Module, layer_decay: float) -> dict[str, float]:
    """Learning-rate factor of each parameter: 1 for the last layer and what follows it, less for each layer below.

    Layer i of L gets ``layer_decay ** (L - 1 - i)``, the embeddings ``layer_decay ** L`` (Clark et al. 2020, ELECTRA,
    arXiv:2003.10555, appendix A).

    Args:
        module: whose parameters.
        layer_decay: factor from one layer to the one below, in (0, 1].
    """
    layer_map = map_layers(module)
    above = {"embeddings": layer_map.num_layers, "final_norm": 0, "head": 0}
    return {
        name: layer_decay ** (above[place] if isinstance(place, str) else layer_map.num_layers - 1 - place)
        for name, place in layer_map.places.items()
    }


def parameter_groups(
    module: nn.Module, weight_decay: float, no_decay: Sequence[str] = (), layer_decay: float | None = None
) -> list[dict[str, Any]]:
    """Split trainable parameters by decay and by rate; each stands in one group, a tied one once.

    Matrices decay, vectors (norms and biases) do not: names of norms differ between models, dimensions do not.

    Args:
        module: whose parameters.
        weight_decay: for parameters of two dimensions and more, embeddings included.
        no_decay: layer ranges that do not decay, such as "9:28" or "embeddings".
        layer_decay: learning-rate factor from one layer to the one below, in (0, 1]; None is 1.

    Returns:
        Groups with ``params``, ``weight_decay`` and ``lr_scale``, which `apply_scales` turns into rates.

    Raises:
        ValueError: a range matches nothing.

    >>> [(len(group["params"]), group["weight_decay"]) for group in parameter_groups(nn.Linear(2, 2), 0.1)]
    [(1, 0.1), (1, 0.0)]
    """
    exempt = set(LayerRange(no_decay).parameters(module)) if no_decay else set()
    scales: Mapping[str, float] = {} if layer_decay is None else layer_scales(module, layer_decay)
    groups: dict[tuple[float, float], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            decay = weight_decay if parameter.ndim >= 2 and name not in exempt else 0.0
            groups[decay, scales.get(name, 1.0)].append(parameter)
    return [
        {"params": parameters, "weight_decay": decay, "lr_scale": scale}
        for (decay, scale), parameters in groups.items()
    ]


def apply_scales(groups: Sequence[dict[str, Any]]) -> None:
    """Multiply an optimizer's learning rates by the ``lr_scale`` of their groups, once, in place."""
    for group in groups:
        group["lr"] *= group.get("lr_scale", 1.0)
