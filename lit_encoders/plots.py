"""Pictures: heat maps and curves, for files and for TensorBoard. Drawn without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Points of a curve: (x, y).
Curve = Sequence[tuple[float, float]]


def heat_map(values: Sequence[Sequence[float]], rows: Sequence[str], columns: Sequence[str], title: str) -> Figure:
    """Draw a table of numbers as colours.

    Args:
        values: rows of columns.
        rows: their names, from the top.
        columns: their names, from the left.
        title: what the numbers are.
    """
    from matplotlib.figure import Figure

    # Without it a logger, which draws no tight box, cuts long names off.
    size = (max(5.0, 1.8 + 0.34 * len(columns)), max(2.2, 1.3 + 0.34 * len(rows)))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(np.asarray(values, dtype=float), aspect="auto", cmap="viridis", interpolation="nearest")
    axes.set_xticks(range(len(columns)), columns, rotation=90, fontsize=8)
    # More names than fit would print over each other.
    every = max(1, len(rows) // 40)
    axes.set_yticks(range(0, len(rows), every), rows[::every], fontsize=8)
    axes.set_title(title, fontsize=10)
    figure.colorbar(image, ax=axes)
    return figure


def curves(panels: Mapping[str, Mapping[str, Curve]], x: str, y: str) -> Figure:
    """Draw curves, one panel beside the other.

    Args:
        panels: name -> (name of a curve -> its points).
        x: what the x axis is.
        y: what the y axis is.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(panels) + 0.6, 3.4))
    for number, (name, lines) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), number + 1)
        for label, points in lines.items():
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
        axes.set_title(name, fontsize=10)
        axes.set_xlabel(x)
        if number == 0:
            axes.set_ylabel(y)
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    figure.tight_layout()
    return figure
