"""What a checkpoint states: phases as far as they have come, and weights of this model only."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_encoders.callbacks.objective_schedule import Phase, ResolvedPhase
from lit_encoders.modules.checkpoint_facts import check_same_run, check_state, phases_so_far

SCHEDULE: list[Any] = [
    ResolvedPhase(Phase("detour", "clm", steps=10), 0, 10, 0),
    ResolvedPhase(Phase("decay", "mlm", steps=5), 10, 15, 0),
]
OWN = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}


@pytest.mark.parametrize(("step", "steps"), [(0, []), (4, [4]), (10, [10]), (12, [10, 2]), (20, [10, 5])])
def test_phases_that_have_begun(step: int, steps: list[int]) -> None:
    phases = phases_so_far(SCHEDULE, "mlm", step)
    assert [phase["steps"] for phase in phases] == steps
    named = [("detour", "clm"), ("decay", "mlm")][: len(steps)]
    assert [(phase["name"], phase["objective"]) for phase in phases] == named


@pytest.mark.parametrize(
    ("state", "got"),
    [
        ({"weight": torch.zeros(2, 3)}, "1 tensors .* got bias"),
        ({**OWN, "more": torch.zeros(1)}, "1 tensors .* got more"),
        ({**OWN, "bias": torch.zeros(3)}, "1 tensors .* got bias"),
        ({}, "2 tensors .* got weight, bias"),
    ],
)
def test_weights_of_another_model(state: dict[str, Tensor], got: str) -> None:
    check_state(OWN, dict(OWN))
    with pytest.raises(ValueError, match=f"^the checkpoint must be of this model: {got}$"):
        check_state(OWN, state)


def facts(seed: int = 0, **config: Any) -> dict[str, Any]:
    return {"config": json.dumps({"rope_theta": 10.0, "use_cache": True, **config}), "seed": seed}


@pytest.mark.parametrize(
    ("now", "fields"),
    [
        (facts(rope_theta=20.0), "model.backbone rope_theta 10.0, got 20.0"),
        (facts(local_attention=64), "model.backbone local_attention None, got 64"),
        (facts(seed=3), "model.seed 0, got 3"),
        (facts(seed=3, rope_theta=1.0), "model.backbone rope_theta 10.0, got 1.0; model.seed 0, got 3"),
    ],
)
def test_another_model_of_the_same_shapes(now: dict[str, Any], fields: str) -> None:
    with pytest.raises(ValueError, match=f"^a checkpoint goes on with the model that it was made with: {fields}$"):
        check_same_run(now, facts())


def test_what_does_not_compute_is_free() -> None:
    check_same_run(facts(use_cache=False, transformers_version="9", dtype="bfloat16", id2label={"0": "a"}), facts())
    check_same_run(facts(seed=3), {"config": facts()["config"]})
