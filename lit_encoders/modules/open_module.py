"""A model as it stands, as a module that can be asked for its losses and activations."""

from __future__ import annotations

from lit_encoders.modules.lit_encoder import LitEncoder


def open_module(source: str) -> LitEncoder:
    """Open a model with the objective that it is for: MLM where its tokenizer has something to mask with, else CLM.

    Args:
        source: folder or hub name.
    """
    module = LitEncoder(source, objective="clm")
    if module.mask_vocabulary is not None:
        module.objective = "mlm"
    return module
