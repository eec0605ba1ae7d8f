"""Layer ranges: which parameters of a model a user means by "0:8", "-6:", "all" or "embeddings"."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from lit_encoders.models.layers import find_layers

_SLICE = re.compile(r"^(-?\d+)?:(-?\d+)?$")


def parse_range(text: str) -> slice:
    """Read a half-open, 0-based range as Python reads a slice.

    Raises:
        TypeError: an integer: YAML read an unquoted ``9:28`` as a number in base 60.
        ValueError: not a range.

    >>> parse_range("9:28"), parse_range("-6:")
    (slice(9, 28, None), slice(-6, None, None))
    """
    if isinstance(text, int):
        raise TypeError(f'layers must be text in quotes, such as "9:28" (YAML reads 9:28 as a number), got {text}')
    found = _SLICE.match(text)
    if not found:
        raise ValueError(f"layers must be like '0:8', '-6:', 'all' or 'embeddings', got {text!r}")
    start, stop = (None if bound is None else int(bound) for bound in found.groups())
    return slice(start, stop)


def select_parameters(
    module: nn.Module, ranges: Sequence[str], layers_path: str | None = None
) -> dict[str, nn.Parameter]:
    """Find the parameters of layer ranges, by name; a tied one appears once.

    Args:
        module: any module, such as a LightningModule.
        ranges: of "a:b", "all" and "embeddings" (every embedding table outside the layers, with norms beside them).
        layers_path: dotted name of the list of layers, where it cannot be found.

    Raises:
        ValueError: a range matches nothing.

    >>> block = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    >>> list(select_parameters(nn.ModuleDict({"layers": block}), ["1:"]))
    ['layers.1.weight', 'layers.1.bias']
    """
    path, layers = find_layers(module, layers_path)
    chosen: dict[str, nn.Parameter] = {}
    named = dict(module.named_parameters())
    for text in ranges:
        if text == "embeddings":
            found = _embedding_names(module, path, named)
        else:
            places = range(len(layers)) if text == "all" else range(len(layers))[parse_range(text)]
            prefixes = tuple(f"{path}.{place}." for place in places)
            found = [name for name in named if name.startswith(prefixes)] if prefixes else []
        if not found:
            raise ValueError(f"layers must match at least one of the model's {len(layers)} layers, got {text!r}")
        chosen.update((name, named[name]) for name in found)
    return chosen


def _embedding_names(module: nn.Module, layers_path: str, named: dict[str, nn.Parameter]) -> list[str]:
    """Parameters of the embedding tables outside the layers, and of what stands beside them (norms, projections)."""
    modules = dict(module.named_modules())
    wanted: set[int] = set()
    for name, child in modules.items():
        if not isinstance(child, nn.Embedding) or name.startswith(f"{layers_path}."):
            continue
        parent = name.rpartition(".")[0]
        # Where the tables stand right beside the layers, their parent is the whole model.
        alone = not parent or layers_path == parent or layers_path.startswith(f"{parent}.")
        wanted |= {id(parameter) for parameter in (child if alone else modules[parent]).parameters()}
    # By identity: a tied table may be listed under its decoder's name.
    return [name for name, parameter in named.items() if id(parameter) in wanted]
