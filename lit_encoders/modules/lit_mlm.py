"""LitMLM: masked language modelling."""

from __future__ import annotations

from lit_encoders.modules.lit_encoder import LitEncoder


class LitMLM(LitEncoder):
    """`LitEncoder` that starts with MLM; a schedule may take it through CLM and back."""

    default_objective = "mlm"
