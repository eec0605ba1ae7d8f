"""Two models on the same items: the difference of a metric with its interval, and the items won and lost.

Source: the paired bootstrap, Koehn (2004), "Statistical significance tests for machine translation evaluation";
percentile intervals, Efron, Tibshirani (1993).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lit_encoders.evaluation.scores import FloatArray, Scores

# With fewer items its intervals are too narrow.
LEAST_ITEMS = 200
DRAWS = 2000


@dataclass(frozen=True)
class Difference:
    """A metric of one model less that of another.

    Attributes:
        value: over all items.
        low: lower end of the interval.
        high: upper end of the interval.
        num_items: that were drawn from.
    """

    value: float
    low: float
    high: float
    num_items: int

    @property
    def differs(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0


def check_items(count: int, name: str = "a paired bootstrap") -> None:
    """Refuse to draw from too few items."""
    if count < LEAST_ITEMS:
        raise ValueError(
            f"{name} must have at least {LEAST_ITEMS} items to compare models on (or --no-compare), got {count}"
        )


def paired_bootstrap(
    ours: Sequence[Scores],
    theirs: Sequence[Scores],
    metric: str,
    draws: int = DRAWS,
    confidence: float = 0.95,
    seed: int = 0,
) -> Difference:
    """Draw items with replacement, the same for both models, and take the difference of their metrics.

    The interval is one over items: it says nothing of what another seed of training would give.

    Args:
        ours: of one model on the items, one for each seed; a metric is the mean over seeds.
        theirs: of the other model on the same items.
        metric: which.
        draws: how often to draw as many items as there are.
        confidence: that the interval holds the difference over all possible items, in (0, 1).
        seed: of the draws.

    Raises:
        ValueError: there are fewer than 200 items, or not the same number on both sides.
    """
    count = len(ours[0])
    if {len(scores) for scores in (*ours, *theirs)} != {count}:
        raise ValueError(f"models must be compared on the same items, got {count} and {len(theirs[0])}")
    check_items(count)
    generator = np.random.default_rng(seed)
    differences = np.empty(draws)
    # Some hundred draws at once: a draw is a weight for each item.
    for start in range(0, draws, 256):
        size = min(256, draws - start)
        weights = generator.multinomial(count, np.full(count, 1 / count), size=size).astype(np.float64)
        differences[start : start + size] = _means(ours, metric, weights) - _means(theirs, metric, weights)
    value = float((_means(ours, metric, np.ones((1, count))) - _means(theirs, metric, np.ones((1, count))))[0])
    low, high = np.quantile(differences, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Difference(value, float(low), float(high), count)


def _means(runs: Sequence[Scores], metric: str, weights: FloatArray) -> FloatArray:
    """The metric under each row of weights, the mean over runs, (B,)."""
    values: FloatArray = np.mean([run.metrics[metric](weights @ run.counts) for run in runs], axis=0)
    return values


@dataclass(frozen=True)
class Tally:
    """Items of a group that one of two models won.

    Attributes:
        group: "" for all items.
        won: by the first model: its mean points over seeds are higher.
        lost: won by the other.
        tied: the rest.
    """

    group: str
    won: int
    lost: int
    tied: int


def tally(ours: Sequence[Scores], theirs: Sequence[Scores], groups: Sequence[str] | None = None) -> list[Tally]:
    """Count items won and lost, over all and by group.

    Args:
        ours, theirs: see `paired_bootstrap`.
        groups: of each item; None for no groups.
    """
    gain = np.mean([run.points for run in ours], axis=0) - np.mean([run.points for run in theirs], axis=0)
    # Means over seeds of equal points must not differ by their rounding.
    sign = np.sign(np.where(np.abs(gain) < 1e-9, 0, gain))
    masks = {"": np.ones(len(sign), dtype=bool)}
    for group in sorted(set(groups or ())):
        masks[group] = np.array([name == group for name in groups or ()])
    return [
        Tally(group, int((sign[mask] > 0).sum()), int((sign[mask] < 0).sum()), int((sign[mask] == 0).sum()))
        for group, mask in masks.items()
    ]
