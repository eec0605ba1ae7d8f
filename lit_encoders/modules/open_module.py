"""A model as it stands, as a module that can be asked for its losses and activations."""

from __future__ import annotations

import torch
from typing_extensions import override

from lit_encoders.modules.lit_encoder import LitEncoder


class _Measured(LitEncoder):
    """A model that no trainer moves: its weights go to the GPU themselves."""

    @override
    def configure_model(self) -> None:
        new = self.backbone is None
        super().configure_model()
        if new and self._trainer is None:
            self.to(measuring_device())


def measuring_device() -> torch.device:
    """Where models are measured: on the GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def open_module(source: str, on_gpu: bool = False) -> LitEncoder:
    """Open a model with the objective that it is for: MLM where its tokenizer has something to mask with, else CLM.

    Args:
        source: folder or hub name.
        on_gpu: whether its weights go to the GPU, where there is one, once they are loaded; else they stay.
    """
    module = (_Measured if on_gpu else LitEncoder)(source, objective="clm")
    if module.mask_vocabulary is not None:
        module.objective = "mlm"
    return module
