"""Student's t: closed forms for few degrees of freedom, scipy for many."""

from __future__ import annotations

import math

import pytest

from lit_encoders.evaluation.statistics import Interval, t_interval, t_quantile


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
