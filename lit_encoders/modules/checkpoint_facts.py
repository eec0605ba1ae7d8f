"""What a checkpoint says of its run beside the weights, and whether its weights are of the model at hand."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lit_encoders.objectives import Objective


def phases_so_far(schedule: Sequence[Any], objective: Objective, step: int) -> list[dict[str, Any]]:
    """Name, objective and optimizer steps of each phase that has begun, in plain types.

    Args:
        schedule: the phases of the run, with their places in it; none is a run of one phase.
        objective: of a run without a schedule.
        step: optimizer steps so far.

    >>> phases_so_far([], "mlm", 3)
    [{'name': 'run', 'objective': 'mlm', 'steps': 3}]
    """
    if not schedule:
        return [{"name": "run", "objective": objective, "steps": step}]
    return [
        {"name": placed.name, "objective": placed.phase.objective, "steps": min(placed.stop, step) - placed.start}
        for placed in schedule
        if placed.start < step
    ]


def check_state(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Refuse the weights of another model, in one line.

    Args:
        own: the model's, by name.
        state: the checkpoint's, by name.

    Raises:
        ValueError: names are missing or unknown, or shapes differ.
    """
    wrong = [name for name in {**own, **state} if name not in own or name not in state]
    wrong = wrong or [name for name, tensor in state.items() if tensor.shape != own[name].shape]
    if wrong:
        raise ValueError(
            f"the checkpoint must be of this model: {len(wrong)} tensors are missing, unknown or of another shape, "
            f"got {', '.join(wrong[:3])}"
        )


# Of a configuration, what says nothing of how the model computes.
_NO_ARITHMETIC = re.compile(
    r"transformers_version|_name_or_path|architectures|d?type|torch_dtype|use_cache|_attn_.*|.*2.*(id|label)|name_or_path"
    r"|problem_type|return_dict|output_.*|classifier_.*|tie_.*"
)


def check_same_run(own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuse to go on with a run whose model computes otherwise, or whose masks and dropout are drawn otherwise.

    Args:
        own: "config" (the model's configuration as JSON) and "seed".
        saved: the same out of a checkpoint; what an older one does not have is not compared.

    Raises:
        ValueError: with the fields that differ, the old value and the new one.
    """
    before, now = (json.loads(facts["config"]) for facts in (saved, own))
    other = [
        f"model.backbone {key} {before.get(key)!r}, got {now.get(key)!r}"
        for key in {**before, **now}
        if not _NO_ARITHMETIC.fullmatch(key) and before.get(key) != now.get(key)
    ]
    if saved.get("seed", own["seed"]) != own["seed"]:
        other.append(f"model.seed {saved['seed']}, got {own['seed']}")
    if other:
        raise ValueError(f"a checkpoint goes on with the model that it was made with: {'; '.join(other[:5])}")
