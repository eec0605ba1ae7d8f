"""Tables of reports: Markdown that reads as plain text too, and numbers with their intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lit_encoders.evaluation.statistics import Interval


def show_difference(interval: Interval) -> str:
    """A difference with its interval; a star where the interval leaves out 0.

    >>> show_difference(Interval(-0.5, 0.25, 3)), show_difference(Interval(0.1, 0.25, 3))
    ('-0.500 ± 0.250 *', '+0.100 ± 0.250')
    >>> show_difference(Interval(1.0, float("inf"), 1))
    '+1.000 (one seed)'
    """
    if math.isinf(interval.half_width):
        return f"{interval.mean:+.3f} (one seed)"
    return f"{interval.mean:+.3f} ± {interval.half_width:.3f}" + (" *" if interval.differs else "")


def show_value(interval: Interval) -> str:
    """A value with its interval.

    >>> show_value(Interval(0.5, 0.25, 3)), show_value(Interval(1.0, float("inf"), 1))
    ('0.500 ± 0.250', '1.000 (one seed)')
    """
    return show_difference(interval).lstrip("+").rstrip(" *")


def plain_interval(interval: Interval) -> dict[str, Any]:
    """An interval for JSON, which has no infinity."""
    return {
        "mean": interval.mean,
        "half_width": None if math.isinf(interval.half_width) else interval.half_width,
        "seeds": interval.num_values,
        "differs": interval.differs,
    }


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, its columns aligned for readers of plain text."""
    widths = [max(len(row[place]) for row in [heads, *rows]) for place in range(len(heads))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 1) + ("-" if place == 0 else ":") for place, width in enumerate(widths)) + "|"
    return "\n".join([line(heads), rule, *(line(row) for row in rows)])
