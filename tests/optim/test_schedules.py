"""Learning rates against their closed forms."""

from math import cos, pi, sqrt
from typing import Any

import pytest

from lit_encoders.optim.schedules import decay_factor, phase_factor


def test_r07_warmup_hold_and_decay_and_two_steps_beyond() -> None:
    """Total 10: a phase of 6 steps with a warm-up of 2, then 4 steps of 1 - sqrt."""
    held = [phase_factor(step, 6, 2, "constant") for step in range(6)]
    falling = [phase_factor(step, 4, 0, "one_minus_sqrt") for step in range(6)]
    expected = [0, 0.5, 1, 1, 1, 1, 1, 0.5, 0.293, 0.134, 0, 0]
    assert held + falling == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine", "one_minus_sqrt"])
def test_r07_no_warmup_starts_at_the_peak(shape: Any) -> None:
    assert phase_factor(0, 10, 0, shape) == 1
    assert phase_factor(0, 10, 0, shape, final_share=0.3) == pytest.approx(1)


@pytest.mark.parametrize(
    ("shape", "closed_form"),
    [
        ("constant", lambda t: 1.0),
        ("linear", lambda t: 1 - t),
        ("cosine", lambda t: (1 + cos(pi * t)) / 2),
        ("one_minus_sqrt", lambda t: 1 - sqrt(t)),
    ],
)
@pytest.mark.parametrize("final_share", [0.0, 0.1, 1.0])
def test_shapes_equal_their_closed_forms(shape: Any, closed_form: Any, final_share: float) -> None:
    steps, warmup = 25, 5
    for step in range(steps):
        expected = step / warmup
        if step >= warmup:
            share = closed_form((step - warmup) / (steps - warmup))
            expected = share * (1 - final_share) + final_share
        assert phase_factor(step, steps, warmup, shape, final_share) == pytest.approx(expected, abs=1e-12)
    for step in (steps, steps + 1, 10 * steps):
        at_end = 1.0 if shape == "constant" else final_share
        assert phase_factor(step, steps, warmup, shape, final_share) == pytest.approx(at_end, abs=1e-12)


def test_progress_outside_the_decay_stays_at_its_ends() -> None:
    assert decay_factor(-0.5, "linear") == 1
    assert decay_factor(1.5, "linear", final_share=0.25) == 0.25


def test_phase_that_is_all_warmup_ends_below_the_peak() -> None:
    assert [phase_factor(step, 4, 4, "linear") for step in range(4)] == [0, 0.25, 0.5, 0.75]


def test_unknown_shape_is_an_error() -> None:
    with pytest.raises(ValueError, match="shape must be one of constant, linear, cosine, one_minus_sqrt, got 'wsd'"):
        phase_factor(0, 10, 0, "wsd")  # type: ignore[arg-type]
