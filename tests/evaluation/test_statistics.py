"""Student's t: closed forms for few degrees of freedom, scipy for many. Shares: the equation that defines them."""

from __future__ import annotations

import math

import pytest

from lit_encoders.evaluation.statistics import Interval, t_interval, t_quantile, wilson_interval


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.999])
def test_quantiles_of_few_degrees_have_closed_forms(confidence: float) -> None:
    tail = (1 - confidence) / 2
    a = 4 * tail * (1 - tail)
    # Shaw (2006), sampling Student's T distribution, J. Comput. Finance 9(4): one, two and four degrees of freedom.
    q = math.cos(math.acos(math.sqrt(a)) / 3) / math.sqrt(a)
    expected = {1: math.tan(math.pi / 2 * confidence), 2: (1 - 2 * tail) * math.sqrt(2 / a), 4: 2 * math.sqrt(q - 1)}
    for degrees, value in expected.items():
        assert t_quantile(confidence, degrees) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 9, 30, 101])
@pytest.mark.parametrize("confidence", [0.01, 0.5, 0.95, 0.9999])
def test_quantiles_are_those_of_scipy(confidence: float, degrees: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    assert t_quantile(confidence, degrees) == pytest.approx(stats.t.ppf((1 + confidence) / 2, degrees), rel=1e-9)


def test_interval_is_that_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    values = [0.3, -0.1, 0.25, 0.9]
    found = t_interval(values, 0.9)
    low, high = stats.t.interval(0.9, 3, loc=sum(values) / 4, scale=stats.sem(values))
    assert (found.mean - found.half_width, found.mean + found.half_width) == pytest.approx((low, high), rel=1e-9)


def test_interval_by_hand() -> None:
    # Three values one apart have s = 1; with two degrees of freedom t = c sqrt(2 / (1 - c^2)).
    assert t_interval([1.0, 2.0, 3.0]).half_width == pytest.approx(
        0.95 * math.sqrt(2 / 0.0975) / math.sqrt(3), rel=1e-12
    )


def test_one_value_says_nothing_of_its_spread() -> None:
    assert t_interval([5.0]) == Interval(5.0, math.inf, 1)
    assert not t_interval([5.0]).differs


def test_equal_values_differ_from_zero_unless_they_are() -> None:
    assert t_interval([0.5, 0.5]).differs
    assert not t_interval([0.0, 0.0]).differs


def test_mistakes_are_said() -> None:
    with pytest.raises(ValueError, match=r"^values must be at least one, got none$"):
        t_interval([])
    with pytest.raises(ValueError, match=r"^confidence must be in \(0, 1\), got 1$"):
        t_quantile(1, 2)
    with pytest.raises(ValueError, match=r"^degrees must be at least 1, got 0$"):
        t_quantile(0.95, 0)


# Shares

# P(|Z| < z) = 0.95, to more digits than a table has.
Z95 = 1.9599639845400545


@pytest.mark.parametrize(("hits", "trials"), [(0, 10), (1, 10), (5, 10), (120, 225), (116, 225), (225, 225), (1, 1)])
def test_ends_of_a_share_are_where_the_score_test_begins_to_refuse(hits: int, trials: int) -> None:
    found = wilson_interval(hits, trials)
    assert found.value == hits / trials
    assert 0 <= found.low <= found.value <= found.high <= 1
    for end in (found.low, found.high):
        if end not in (0, 1):
            score = (found.value - end) / math.sqrt(end * (1 - end) / trials)
            assert abs(score) == pytest.approx(Z95, rel=1e-9)


def test_shares_with_a_simple_form() -> None:
    # None of n: the equation is p = z^2 (1 - p) / n. Half of n: 1/2 +- z / (2 sqrt(n + z^2)).
    none, half, every = (wilson_interval(hits, 30) for hits in (0, 15, 30))
    assert (none.low, none.high) == (0.0, pytest.approx(Z95**2 / (30 + Z95**2), rel=1e-12))
    assert (every.low, every.high) == (pytest.approx(1 - none.high, rel=1e-12), 1.0)
    half_width = Z95 / (2 * math.sqrt(30 + Z95**2))
    assert (half.low, half.high) == (pytest.approx(0.5 - half_width), pytest.approx(0.5 + half_width))
    assert half.holds(0.5)
    assert not every.holds(0.5)


def test_surer_is_wider_and_more_trials_are_narrower() -> None:
    narrow, wide = wilson_interval(60, 100, 0.5), wilson_interval(60, 100, 0.99)
    assert wide.low < narrow.low < narrow.high < wide.high
    assert wilson_interval(600, 1000).low > wilson_interval(60, 100).low


@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
def test_shares_are_those_of_scipy(confidence: float) -> None:
    stats = pytest.importorskip("scipy.stats")
    for hits, trials in ((0, 7), (3, 7), (140, 225), (7, 7)):
        expected = stats.binomtest(hits, trials).proportion_ci(confidence, method="wilson")
        found = wilson_interval(hits, trials, confidence)
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0), r"^trials must be at least 1, got 0$"),
        ((5, 4), r"^hits must be from 0 to the 4 trials, got 5$"),
        ((-1, 4), r"^hits must be from 0 to the 4 trials, got -1$"),
        ((1, 4, 1.0), r"^confidence must be in \(0, 1\), got 1.0$"),
    ],
)
def test_mistakes_about_shares_are_said(arguments: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wilson_interval(*arguments)
