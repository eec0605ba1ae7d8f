"""The trainer's precision: which to take where the user names none, which is refused, and what it computes in."""

from __future__ import annotations

import torch


def automatic_precision(accelerator: str) -> str:
    """Choose bf16 where the hardware multiplies in it, else float32.

    Args:
        accelerator: the trainer's setting: "auto", "cpu", "gpu", ...

    >>> automatic_precision("cpu") in ("bf16-mixed", "32-true")
    True
    """
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bf16-mixed" if fast else "32-true"


def check_precision(precision: str) -> None:
    """Refuse a precision of the trainer that would change the type of the weights.

    Raises:
        ValueError: it is a "true" one other than 32-true.
    """
    if precision.endswith("-true") and precision != "32-true":
        raise ValueError(
            "trainer.precision must be 32-true, bf16-mixed or 16-mixed (model.dtype sets the type of the weights), "
            f"got {precision}"
        )


def compute_dtype(precision: str, weights: torch.dtype) -> torch.dtype:
    """The type that attention computes in.

    Args:
        precision: of the trainer.
        weights: type of the weights.

    >>> compute_dtype("bf16-mixed", torch.float32), compute_dtype("32-true", torch.float64)
    (torch.bfloat16, torch.float64)
    """
    if precision.startswith("bf16"):
        return torch.bfloat16
    if precision.startswith(("16", "transformer-engine-float16")):
        return torch.float16
    return weights
