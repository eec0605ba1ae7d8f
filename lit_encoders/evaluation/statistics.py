"""What a few runs say about a mean: Student's t interval, without tables.

Source of the t distribution in closed form: Abramowitz, Stegun (1964), 26.7.3 and 26.7.4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Halvings of an angle below pi / 2: beyond the precision of a double.
_HALVINGS = 60


@dataclass(frozen=True)
class Interval:
    """A mean and how far it may be off.

    Attributes:
        mean: of the values.
        half_width: of the confidence interval; infinite for a single value, which says nothing of its spread.
        num_values: how many there were.
    """

    mean: float
    half_width: float
    num_values: int

    @property
    def differs(self) -> bool:
        """Whether the interval leaves out 0."""
        return abs(self.mean) > self.half_width


def t_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """The confidence interval of a mean over independent values, ``mean +- t(n - 1) s / sqrt(n)``.

    Args:
        values: at least one.
        confidence: that the interval holds the true mean, in (0, 1).

    Raises:
        ValueError: there is no value.

    >>> found = t_interval([1.0, 2.0, 3.0]); found.mean, round(found.half_width, 6), found.differs
    (2.0, 2.484138, False)
    """
    count = len(values)
    if count == 0:
        raise ValueError("values must be at least one, got none")
    mean = math.fsum(values) / count
    if count == 1:
        return Interval(mean, math.inf, 1)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return Interval(mean, t_quantile(confidence, count - 1) * math.sqrt(variance / count), count)


def t_quantile(confidence: float, degrees: int) -> float:
    """The ``t`` that Student's variable stays within, ``P(|T| < t) = confidence``.

    Args:
        confidence: in (0, 1).
        degrees: of freedom, at least 1.

    Raises:
        ValueError: an argument is out of its range.

    >>> round(t_quantile(0.95, 2), 6), round(t_quantile(0.95, 30), 6)
    (4.302653, 2.042272)
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be in (0, 1), got {confidence}")
    if degrees < 1:
        raise ValueError(f"degrees must be at least 1, got {degrees}")
    low, high = 0.0, math.pi / 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < confidence else (low, middle)
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _within(angle: float, degrees: int) -> float:
    """P(|T| < sqrt(degrees) tan(angle)), a finite sum for whole degrees of freedom."""
    cosine = math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = 0.0
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total
