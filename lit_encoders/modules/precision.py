"""The precision to train in where the user names none."""

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
