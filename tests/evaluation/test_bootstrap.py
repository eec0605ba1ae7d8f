"""Intervals of the paired bootstrap hold the true difference as often as they say, and wins are counted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from lit_encoders.evaluation.bootstrap import Difference, Tally, paired_bootstrap, tally
from lit_encoders.evaluation.scores import Scores, class_scores, column_ratio
from lit_encoders.evaluation.statistics import t_interval

Labels = tuple[np.ndarray, np.ndarray, np.ndarray]


def hits(values: np.ndarray) -> Scores:
    """Items that are right or wrong, and nothing else."""
    return Scores(np.stack([values, np.ones(len(values))], 1), {"accuracy": column_ratio(0, 1)}, values.astype(float))


def draw_hits(generator: np.random.Generator, count: int) -> tuple[Scores, Scores]:
    """Two models that are right on 7 and on 6 items of 10, mostly on the same ones."""
    level = generator.random(count)
    other = np.where(generator.random(count) < 0.6, level, generator.random(count))
    return hits(level < 0.7), hits(other < 0.6)


def draw_classes(generator: np.random.Generator, count: int) -> tuple[Scores, Scores]:
    """Two models that confuse classes at unlike rates, on the same items."""
    gold = generator.choice(3, size=count, p=[0.5, 0.3, 0.2])
    guess = generator.integers(3, size=count)
    sides = [np.where(generator.random(count) < skill, gold, guess) for skill in (0.7, 0.55)]
    names = ["a", "b", "c"]
    named = [[names[number] for number in numbers] for numbers in (gold, *sides)]
    return class_scores(named[0], named[1], names), class_scores(named[0], named[2], names)


# A ratio of sums has no closed form: the difference over half a million items stands for it.
@pytest.mark.parametrize(
    ("draw", "metric", "data_sets", "draws"),
    [(draw_hits, "accuracy", 2000, 120), (draw_classes, "macro_f1", 500, 120)],
)
def test_interval_holds_the_true_difference_as_often_as_it_says(
    draw: Callable[[np.random.Generator, int], tuple[Scores, Scores]], metric: str, data_sets: int, draws: int
) -> None:
    ours, theirs = draw(np.random.default_rng(1), 500_000)
    truth = ours.value(metric) - theirs.value(metric)
    assert truth > 0.05
    generator = np.random.default_rng(2)
    held = 0
    for number in range(data_sets):
        ours, theirs = draw(generator, 200)
        found = paired_bootstrap([ours], [theirs], metric, draws=draws, seed=number)
        held += found.low <= truth <= found.high
    assert 0.93 <= held / data_sets <= 0.97


def test_interval_over_five_seeds_holds_the_true_mean_as_often_as_it_says() -> None:
    values = np.random.default_rng(0).normal(0.8, 0.02, size=(2000, 5))
    found = [t_interval(row) for row in values.tolist()]
    held = sum(abs(interval.mean - 0.8) <= interval.half_width for interval in found)
    assert 0.93 <= held / 2000 <= 0.97


def test_difference_is_that_of_the_metrics_and_its_interval_that_of_a_loop() -> None:
    ours, theirs = draw_classes(np.random.default_rng(3), 250)
    found = paired_bootstrap([ours], [theirs], "macro_f1", draws=3000)
    assert found.value == pytest.approx(ours.value("macro_f1") - theirs.value("macro_f1"))
    assert found.num_items == 250
    generator = np.random.default_rng(99)
    differences = []
    for _ in range(3000):
        items = generator.integers(250, size=250)
        sums = [scores.counts[items].sum(0) for scores in (ours, theirs)]
        differences.append(float(ours.metrics["macro_f1"](sums[0]) - theirs.metrics["macro_f1"](sums[1])))
    assert (found.low, found.high) == pytest.approx(np.quantile(differences, [0.025, 0.975]), abs=0.006)
    assert found.differs == (found.low > 0)


def test_items_are_paired() -> None:
    """Two models that are right on the same items differ by nothing, whatever is drawn."""
    ours, _ = draw_hits(np.random.default_rng(4), 200)
    found = paired_bootstrap([ours], [ours], "accuracy", draws=50)
    assert found == Difference(0.0, 0.0, 0.0, 200)
    assert not found.differs


def test_metric_of_several_seeds_is_their_mean() -> None:
    generator = np.random.default_rng(5)
    ours = [draw_hits(generator, 200)[0] for _ in range(3)]
    theirs = [draw_hits(generator, 200)[1] for _ in range(2)]
    expected = np.mean([run.value("accuracy") for run in ours]) - np.mean([run.value("accuracy") for run in theirs])
    assert paired_bootstrap(ours, theirs, "accuracy", draws=20).value == pytest.approx(expected)


def test_draws_follow_the_seed_alone() -> None:
    ours, theirs = draw_hits(np.random.default_rng(6), 200)
    np.random.seed(1)
    first = paired_bootstrap([ours], [theirs], "accuracy", draws=300)
    np.random.seed(2)
    assert paired_bootstrap([ours], [theirs], "accuracy", draws=300) == first
    assert paired_bootstrap([ours], [theirs], "accuracy", draws=300, seed=1).low != first.low


def test_too_few_items_are_refused() -> None:
    ours, theirs = draw_hits(np.random.default_rng(7), 199)
    with pytest.raises(
        ValueError, match=r"^a paired bootstrap must have at least 200 items to compare models on \(.*199$"
    ):
        paired_bootstrap([ours], [theirs], "accuracy")


def test_other_items_are_refused() -> None:
    generator = np.random.default_rng(8)
    with pytest.raises(ValueError, match=r"^models must be compared on the same items, got 200 and 201$"):
        paired_bootstrap([draw_hits(generator, 200)[0]], [draw_hits(generator, 201)[1]], "accuracy")


def test_items_won_and_lost_are_counted_by_group() -> None:
    """Of several seeds by the mean of an item's points; sums that differ by rounding alone are ties."""

    def run(*points: float) -> Scores:
        return Scores(np.ones((len(points), 1)), {}, np.array(points))

    ours = [run(1.0, 0.0, 0.1, 1.0), run(1.0, 0.0, 0.2, 0.0)]
    theirs = [run(0.0, 1.0, 0.3, 1.0)] * 3
    theirs[0] = run(0.0, 1.0, -0.15, 0.0)
    assert tally(ours, theirs, ["n", "n", "m", "m"]) == [
        Tally("", won=1, lost=2, tied=1),
        Tally("m", won=0, lost=1, tied=1),
        Tally("n", won=1, lost=1, tied=0),
    ]
    assert [found.group for found in tally(ours, theirs)] == [""]
