"""What a model got on each item of a test set, kept so that any resampling of the items gives the metric again.

A metric is a function of sums over items (correct ones, hits of a class, nats and tokens): of all items for the figure,
of resampled ones for its interval.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
# Sums over items, (..., K) -> metric, (...).
Combine = Callable[[FloatArray], FloatArray]


@dataclass(frozen=True)
class Scores:
    """What one run of a model got.

    Attributes:
        counts: of each item, (N, K).
        metrics: name -> what the sums of the counts mean.
        points: of each item, higher is better, (N,): which of two models won it.
        lower_is_better: names of metrics that are so.
    """

    counts: FloatArray
    metrics: dict[str, Combine]
    points: FloatArray
    lower_is_better: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(self.counts)

    def value(self, metric: str) -> float:
        """The metric over all items."""
        return float(self.metrics[metric](self.counts.sum(0)))


def column_ratio(above: int, below: int) -> Combine:
    """A sum over another sum, 0 where nothing is below.

    >>> float(column_ratio(0, 1)(np.array([3.0, 4.0])))
    0.75
    """

    def combine(sums: FloatArray) -> FloatArray:
        bottom = sums[..., below]
        return np.divide(sums[..., above], bottom, out=np.zeros_like(bottom), where=bottom > 0)

    return combine


def f1(hits: FloatArray, wrong: FloatArray, missed: FloatArray) -> FloatArray:
    """F1 out of numbers of hits, of wrongly found and of missed ones; NaN where there is none of any.

    >>> f1(np.array([2.0, 0.0]), np.array([1.0, 0.0]), np.array([1.0, 0.0])).tolist()
    [0.6666666666666666, nan]
    """
    total = 2 * hits + wrong + missed
    return np.divide(2 * hits, total, out=np.full_like(total, np.nan), where=total > 0)


def mean_of_known(values: FloatArray) -> FloatArray:
    """Mean over the last axis of what is no NaN, 0 where all is: macro F1 leaves out classes that are nowhere.

    >>> mean_of_known(np.array([[0.5, np.nan], [np.nan, np.nan]])).tolist()
    [0.5, 0.0]
    """
    known = ~np.isnan(values)
    total: FloatArray = np.where(known, values, 0).sum(-1)
    mean: FloatArray = total / np.maximum(known.sum(-1), 1)
    return mean


def class_scores(gold: Sequence[str], predicted: Sequence[str], classes: Sequence[str]) -> Scores:
    """Accuracy, macro F1 (over classes that are there or were predicted) and F1 of each class.

    Args:
        gold: class of each item.
        predicted: what the model says of it; what is no class is missed, and wrong for no class.
        classes: all that may stand there.

    >>> scores = class_scores(["a", "b", "b"], ["a", "b", "a"], ["a", "b"])
    >>> [round(scores.value(name), 3) for name in ("accuracy", "macro_f1", "f1/a", "f1/b")]
    [0.667, 0.667, 0.667, 0.667]
    """
    numbers = {name: place for place, name in enumerate(classes)}
    truth = np.array([numbers[name] for name in gold], dtype=np.int64)
    said = np.array([numbers.get(name, -1) for name in predicted], dtype=np.int64)
    size, items = len(classes), np.arange(len(truth))
    correct = truth == said
    wrong = ~correct & (said >= 0)
    counts = np.zeros((len(truth), 3 * size + 2))
    counts[items[correct], truth[correct]] = 1
    counts[items[wrong], size + said[wrong]] = 1
    counts[items[~correct], 2 * size + truth[~correct]] = 1
    counts[:, -2], counts[:, -1] = correct, 1

    def per_class(sums: FloatArray) -> FloatArray:
        return f1(sums[..., :size], sums[..., size : 2 * size], sums[..., 2 * size : 3 * size])

    metrics: dict[str, Combine] = {
        "accuracy": column_ratio(3 * size, 3 * size + 1),
        "macro_f1": lambda sums: mean_of_known(per_class(sums)),
    }
    for name, place in numbers.items():
        metrics[f"f1/{name}"] = lambda sums, place=place: np.nan_to_num(per_class(sums)[..., place])  # type: ignore[misc]
    return Scores(counts, metrics, correct.astype(np.float64))
