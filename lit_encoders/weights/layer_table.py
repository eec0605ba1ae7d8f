"""What ranges a model has: its layers and named parts, their names and sizes."""

from __future__ import annotations

import math
from itertools import takewhile

from rich.console import Console
from rich.table import Table

from lit_encoders.weights.checkpoint import Weights, open_weights


def layer_rows(weights: Weights) -> list[tuple[str, str, int, int]]:
    """One row per place of a model: range, names of its tensors, their number, number of weights."""
    rows = []
    for place in dict.fromkeys(weights.layer_map.places.values()):
        names = [name for name, at in weights.layer_map.places.items() if at == place]
        label = f"{place}:{place + 1}" if isinstance(place, int) else place
        path = f"{weights.layer_map.path}.{place}." if isinstance(place, int) else _common_prefix(names)
        text = names[0] if len(names) == 1 else f"{path}*"
        rows.append((label, text, len(names), sum(math.prod(weights.shapes[name]) for name in names)))
    return rows


def _common_prefix(names: list[str]) -> str:
    """The modules that names have in common.

    >>> _common_prefix(["a.b.c", "a.b.d"]), _common_prefix(["a.b", "c.b"])
    ('a.b.', '')
    """
    components = zip(*(name.split(".") for name in names), strict=False)
    return "".join(f"{same[0]}." for same in takewhile(lambda parts: len(set(parts)) == 1, components))


def layers_verb(model: str) -> str:
    """List the layer ranges of a model.

    Args:
        model: folder, hub name, or a checkpoint of a run.
    """
    weights = open_weights(model, "model")
    rows = layer_rows(weights)
    total = sum(size for *_, size in rows)
    table = Table(title=f"{weights.architecture}: {weights.layer_map.num_layers} layers, {total:,} weights")
    for column, side in (
        ("range", "left"),
        ("names", "left"),
        ("tensors", "right"),
        ("weights", "right"),
        ("share", "right"),
    ):
        table.add_column(column, justify=side)  # type: ignore[arg-type]
    for label, names, tensors, size in rows:
        table.add_row(label, names, f"{tensors}", f"{size:,}", f"{size / total:.1%}")
    console = Console(width=120)
    with console.capture() as captured:
        console.print(table)
        for name, listed in weights.layer_map.ties.items():
            console.print(f"{name} is {listed} (tied): it counts once", soft_wrap=True, highlight=False)
    return captured.get().rstrip()
