"""LitCLM: causal language modelling, of decoders and of encoders."""

from __future__ import annotations

from lit_encoders.modules.lit_encoder import LitEncoder


class LitCLM(LitEncoder):
    """`LitEncoder` that starts with CLM; needs no mask token."""

    default_objective = "clm"
