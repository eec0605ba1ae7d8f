"""Scores of classes against scikit-learn's, over all items and over resampled ones."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, f1_score

from lit_encoders.evaluation.scores import class_scores, column_ratio

CLASSES = ["a", "b", "c", "d", "never"]


def draw_labels(count: int, seed: int) -> tuple[list[str], list[str]]:
    """Gold and predicted, of classes of unlike sizes; one class is nowhere."""
    generator = np.random.default_rng(seed)
    gold = generator.choice(CLASSES[:4], size=count, p=[0.55, 0.3, 0.1, 0.05])
    predicted = np.where(generator.random(count) < 0.6, gold, generator.choice(CLASSES[:4], size=count))
    return gold.tolist(), predicted.tolist()


def expected_scores(gold: list[str], predicted: list[str]) -> dict[str, float]:
    singles = f1_score(gold, predicted, labels=CLASSES, average=None, zero_division=0)
    return {
        "accuracy": accuracy_score(gold, predicted),
        "macro_f1": f1_score(gold, predicted, average="macro", zero_division=0),
        **{f"f1/{name}": value for name, value in zip(CLASSES, singles, strict=True)},
    }


@pytest.mark.parametrize("count", [1, 7, 300])
def test_scores_are_those_of_scikit_learn(count: int) -> None:
    gold, predicted = draw_labels(count, seed=count)
    scores = class_scores(gold, predicted, CLASSES)
    assert len(scores) == count
    assert {name: scores.value(name) for name in scores.metrics} == pytest.approx(expected_scores(gold, predicted))
    assert scores.points.tolist() == [float(one == other) for one, other in zip(gold, predicted, strict=True)]


def test_scores_of_resampled_items_are_those_of_scikit_learn() -> None:
    """As a bootstrap draws them: a class may be in none of the items drawn, and is then left out of macro F1."""
    gold, predicted = draw_labels(25, seed=1)
    scores = class_scores(gold, predicted, CLASSES)
    weights = np.random.default_rng(0).multinomial(25, np.full(25, 1 / 25), size=40)
    found = {name: metric(weights @ scores.counts) for name, metric in scores.metrics.items()}
    absent = 0
    for row, drawn in enumerate(weights):
        items = np.repeat(np.arange(25), drawn).tolist()
        expected = expected_scores([gold[item] for item in items], [predicted[item] for item in items])
        assert {name: values[row] for name, values in found.items()} == pytest.approx(expected)
        absent += "d" not in {gold[item] for item in items}
    assert absent


def test_what_is_no_class_is_missed_and_wrong_for_none() -> None:
    """So that something cut off is an error without being a class of its own."""
    scores = class_scores(["a", "b"], ["a", ""], ["a", "b"])
    assert [scores.value(name) for name in ("accuracy", "macro_f1", "f1/a", "f1/b")] == [0.5, 0.5, 1.0, 0.0]
    assert set(scores.metrics) == {"accuracy", "macro_f1", "f1/a", "f1/b"}


def test_ratio_over_nothing_is_nothing() -> None:
    assert column_ratio(0, 1)(np.array([[3.0, 4.0], [3.0, 0.0]])).tolist() == [0.75, 0.0]
