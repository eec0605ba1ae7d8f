"""Where weights started: a copy to pull toward, to measure from, or to go back to; and how it is recognised again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lit_encoders.models.sharding import local, piece_of, sum_rows
from lit_encoders.weights.alike import listed
from lit_encoders.weights.checkpoint import Weights
from lit_encoders.weights.names import match_names

# Copies by module, then by where they are from, then by name: callbacks with the same start share one.
_COPIES: WeakKeyDictionary[nn.Module, dict[str, dict[str, Tensor]]] = WeakKeyDictionary()


def copies(module: nn.Module, source: str) -> dict[str, Tensor]:
    """The copies of a module's weights from one source that callbacks hold so far, to share and to add to."""
    return _COPIES.setdefault(module, {}).setdefault(source, {})


def copy_weights(parameters: Mapping[str, nn.Parameter], device: str | None = None) -> dict[str, Tensor]:
    """Copy the weights of this process, sharded as they are.

    Args:
        parameters: by name.
        device: where to keep the copy; None beside the weights.
    """
    return {name: local(p.detach()).to(device=device, copy=True) for name, p in parameters.items()}


def read_anchor(
    parameters: Mapping[str, nn.Parameter], everything: Sequence[str], weights: Weights, device: str | None = None
) -> dict[str, Tensor]:
    """Read the start of parameters from a model on disk, each process its own pieces, one tensor at a time.

    Args:
        parameters: by name, whatever wrappers the names begin with.
        everything: names of all the module's parameters, by which wrappers are recognised.
        weights: the model on disk.
        device: where to keep the pieces; None beside the parameters.

    Raises:
        ValueError: it lacks some of them, or has them in another shape.
    """
    found = match_names(everything, weights.tensors)
    missing = [name for name in parameters if name not in found]
    if missing:
        raise ValueError(f"{weights.key} must hold what is anchored, '{weights.source}' lacks {listed(missing)}")
    anchors = {}
    for name, parameter in parameters.items():
        stored = weights.tensors[found[name]]
        if stored.shape != tuple(parameter.shape):
            raise ValueError(
                f"{weights.key} must be of the model's sizes, got {list(stored.shape)} for {name} of "
                f"{list(parameter.shape)} in '{weights.source}'"
            )
        anchors[name] = piece_of(stored.load(), parameter).to(device=device)
    return anchors


def weight_sums(parameters: Mapping[str, nn.Parameter], pieces: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Sum and sum of squares of each tensor in float64, over all processes: how a start is recognised again.

    Args:
        parameters: by name, for how they are sharded.
        pieces: this process's pieces of the tensors, by the same names.
    """
    if not parameters:
        return {}
    double = [pieces[name].detach().double() for name in parameters]
    sums = torch.stack([torch.stack([x.sum(), x.square().sum()]) for x in double])
    first = next(iter(parameters.values()))
    whole = sum_rows(sums.to(local(first).device), list(parameters.values()))
    return dict(zip(parameters, whole.tolist(), strict=True))


def differing(saved: Mapping[str, Sequence[float]], now: Mapping[str, Sequence[float]]) -> list[str]:
    """Names whose sums are not the saved ones, beyond what the order of adding up may change.

    A name that was not saved (its weight was frozen then, say) says nothing.

    >>> differing({"w": [3.0, 9.0]}, {"w": [3.0, 9.5], "v": [1.0, 1.0]})
    ['w']
    """
    return [
        name
        for name in now
        if name in saved and any(not _close(a, b, now[name]) for a, b in zip(saved[name], now[name], strict=True))
    ]


def _close(a: float, b: float, sums: Sequence[float]) -> bool:
    # A sum may cancel out, so its size says nothing of its error; the squares' does.
    return abs(a - b) <= 1e-9 * (abs(a) + sums[1]) + 1e-12
