"""Names of the same weights, with a prefix on one side or the other."""

import pytest

from lit_encoders.weights.names import match_names

INSIDE = ["embeddings.weight", "layer.0.weight", "layer.1.weight", "norm.weight"]


@pytest.mark.parametrize("prefix", ["", "bert.", "backbone.model.bert."])
def test_w04_prefix_on_either_side(prefix: str) -> None:
    outside = [prefix + name for name in INSIDE]
    assert match_names(outside, INSIDE) == dict(zip(outside, INSIDE, strict=True))
    assert match_names(INSIDE, outside) == dict(zip(INSIDE, outside, strict=True))


def test_w04_what_has_no_counterpart_is_left_out() -> None:
    wanted = ["bert.layer.0.weight", "bert.layer.1.weight", "cls.bias"]
    assert match_names(wanted, ["layer.0.weight", "layer.1.renamed", "layer.2.weight"]) == {
        "bert.layer.0.weight": "layer.0.weight"
    }


def test_order_does_not_matter() -> None:
    assert match_names(INSIDE, INSIDE[::-1]) == {name: name for name in INSIDE}


def test_longest_match_wins() -> None:
    """A whole model beside a few names of something else."""
    stored = [*(f"model.{name}" for name in INSIDE), "norm.weight"]
    assert match_names(INSIDE, stored) == {name: f"model.{name}" for name in INSIDE}


def test_two_prefixes_that_fit_equally_are_an_error() -> None:
    stored = [f"{who}.{name}" for who in ("teacher", "student") for name in INSIDE]
    with pytest.raises(ValueError, match=r"in one way, got 4 matches under both '\w+\.' and '\w+\.'"):
        match_names(INSIDE, stored)


def test_nothing_matches_nothing() -> None:
    assert match_names(["a"], ["b"]) == {}
    assert match_names([], ["b"]) == {}
    assert match_names(["a"], []) == {}
