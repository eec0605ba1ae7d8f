"""Tables of reports: they parse as Markdown, and numbers say what is known of them."""

from __future__ import annotations

import json
import math

import pytest

from lit_encoders.evaluation.statistics import Interval, t_interval
from lit_encoders.evaluation.tables import markdown, plain_interval, show_difference, show_value

ONE_SEED = Interval(-0.25, math.inf, 1)


def test_table_is_aligned_and_its_numbers_stand_right() -> None:
    assert markdown(["row", "", "a"], [["x", "+0.500", "1"], ["longer", "-1.0", "2.5"]]).splitlines() == [
        "| row    |        | a   |",
        "|--------|-------:|----:|",
        "| x      | +0.500 | 1   |",
        "| longer | -1.0   | 2.5 |",
    ]


def test_table_without_rows_has_its_head() -> None:
    assert markdown(["a", "bc"], []) == "| a | bc |\n|---|---:|"


@pytest.mark.parametrize("row", [["x"], ["x", "1", "2"]])
def test_row_of_another_length_is_refused(row: list[str]) -> None:
    with pytest.raises((ValueError, IndexError)):
        markdown(["a", "b"], [row])


def test_star_is_for_intervals_without_zero() -> None:
    assert show_difference(Interval(0.25, 0.25, 3)) == "+0.250 ± 0.250"
    assert show_difference(Interval(0.2501, 0.25, 3)) == "+0.250 ± 0.250 *"
    assert show_difference(Interval(0.0, 0.0, 3)) == "+0.000 ± 0.000"


def test_values_keep_their_sign_and_have_no_star() -> None:
    assert show_value(Interval(0.5, 0.1, 3)) == "0.500 ± 0.100"
    assert show_value(Interval(-0.5, 0.1, 3)) == "-0.500 ± 0.100"
    assert show_value(ONE_SEED) == "-0.250 (one seed)"


def test_interval_survives_json() -> None:
    interval = t_interval([1.5, 2.0, 2.5])
    assert json.loads(json.dumps(plain_interval(interval), allow_nan=False)) == {
        "mean": interval.mean,
        "half_width": interval.half_width,
        "seeds": 3,
        "differs": True,
    }
    one = json.loads(json.dumps(plain_interval(ONE_SEED), allow_nan=False))
    assert one == {"mean": -0.25, "half_width": None, "seeds": 1, "differs": False}
