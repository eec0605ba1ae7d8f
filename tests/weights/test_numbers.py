"""Lists of numbers as people type them."""

import pytest

from lit_encoders.weights.numbers import parse_numbers


@pytest.mark.parametrize(
    ("value", "numbers"),
    [
        ("0,.25,1", [0.0, 0.25, 1.0]),
        ("0.5", [0.5]),
        (" 0.1 , 1.0 ", [0.1, 1.0]),
        ("[0, 1]", [0.0, 1.0]),
        ("-1,1e-3", [-1.0, 0.001]),
        (0.5, [0.5]),
        (1, [1.0]),
        ([0, "0.5"], [0.0, 0.5]),
    ],
)
def test_numbers(value: object, numbers: list[float]) -> None:
    assert parse_numbers(value) == numbers


@pytest.mark.parametrize("value", ["", "a", "1,,2", "1;2", "1,b", "nan", "1,inf", [], None, "0.1 0.2"])
def test_what_is_no_list_of_numbers(value: object) -> None:
    with pytest.raises(ValueError, match=r"must be numbers with commas between them, such as 0,.25,1, got") as caught:
        parse_numbers(value)
    assert repr(value) in str(caught.value)
