"""What a few runs say about a mean, and some trials about a share: intervals, without tables.

Sources: the t distribution in closed form, Abramowitz, Stegun (1964), 26.7.3 and 26.7.4; the interval of a share,
Wilson (1927), doi:10.1080/01621459.1927.10502953.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

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


@dataclass(frozen=True)
class Share:
    """How many of some trials came out, and how far their share may be off.

    Attributes:
        hits: trials that came out.
        trials: all of them.
        low: lower end of the confidence interval, in [0, 1].
        high: its upper end.
    """

    hits: int
    trials: int
    low: float
    high: float

    @property
    def value(self) -> float:
        """Hits over trials."""
        return self.hits / self.trials

    def holds(self, share: float) -> bool:
        """Whether the interval holds a share."""
        return self.low <= share <= self.high


def wilson_interval(hits: int, trials: int, confidence: float = 0.95) -> Share:
    """Wilson's confidence interval of a share over independent trials: all shares whose score test does not refuse.

    Its ends are the roots of ``(hits / trials - p)^2 = z^2 p (1 - p) / trials``; it never leaves [0, 1].

    Args:
        hits: trials that came out, 0 to ``trials``.
        trials: at least 1.
        confidence: that the interval holds the true share, in (0, 1).

    Raises:
        ValueError: an argument is out of its range.

    >>> found = wilson_interval(8, 10); found.value, round(found.low, 4), round(found.high, 4), found.holds(0.5)
    (0.8, 0.4902, 0.9433, True)
    """
    if trials < 1:
        raise ValueError(f"trials must be at least 1, got {trials}")
    if not 0 <= hits <= trials:
        raise ValueError(f"hits must be from 0 to the {trials} trials, got {hits}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be in (0, 1), got {confidence}")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    misses = trials - hits
    centre = (hits + z**2 / 2) / (trials + z**2)
    half_width = z / (trials + z**2) * math.sqrt(hits * misses / trials + z**2 / 4)
    # Where all or none came out an end is 0 or 1; rounding would miss it.
    low = 0.0 if hits == 0 else centre - half_width
    high = 1.0 if misses == 0 else centre + half_width
    return Share(hits, trials, low, high)
