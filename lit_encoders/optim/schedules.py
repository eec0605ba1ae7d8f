"""Learning rates as pure functions of the optimizer step."""

from __future__ import annotations

import math
from typing import Literal, get_args

Shape = Literal["constant", "linear", "cosine", "one_minus_sqrt"]


def decay_factor(progress: float, shape: Shape, final_share: float = 0.0) -> float:
    """Share of the peak at a point of a phase.

    ``final_share + (1 - final_share) * f(t)``, f being 1, 1 - t, (1 + cos(pi t)) / 2, or 1 - sqrt(t) (Haegele et al.
    2024, arXiv:2405.18392).

    Args:
        progress: t, from 0 at the start of the decay to 1 at its end; beyond, it stays at the end.
        shape: of the decay.
        final_share: share of the peak at t = 1, in [0, 1].

    >>> [round(decay_factor(t / 4, "one_minus_sqrt"), 3) for t in range(5)]
    [1.0, 0.5, 0.293, 0.134, 0.0]
    """
    t = min(max(progress, 0.0), 1.0)
    falls = {
        "constant": 1.0,
        "linear": 1.0 - t,
        "cosine": (1.0 + math.cos(math.pi * t)) / 2,
        "one_minus_sqrt": 1.0 - math.sqrt(t),
    }
    if shape not in falls:
        raise ValueError(f"shape must be one of {', '.join(get_args(Shape))}, got {shape!r}")
    return final_share + (1.0 - final_share) * falls[shape]


def phase_factor(step: int, steps: int, warmup_steps: int, shape: Shape, final_share: float = 0.0) -> float:
    """Share of the peak at one step of a phase: a linear warm-up from 0, then the shape.

    Args:
        step: optimizer step within the phase, from 0.
        steps: length of the phase.
        warmup_steps: steps of the warm-up, 0 starts at the peak.
        shape: from the warm-up's end to the phase's end.
        final_share: share of the peak where the shape ends.

    >>> [phase_factor(s, 6, 2, "constant") for s in range(6)]
    [0.0, 0.5, 1.0, 1.0, 1.0, 1.0]
    """
    if step < warmup_steps:
        return step / warmup_steps
    return decay_factor((step - warmup_steps) / max(1, steps - warmup_steps), shape, final_share)
