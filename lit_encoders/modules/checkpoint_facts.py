"""What a checkpoint says of its run beside the weights, and whether its weights are of the model at hand."""

from __future__ import annotations

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
