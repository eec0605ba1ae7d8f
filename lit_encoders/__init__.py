"""PyTorch Lightning parts for (continued) pretraining of transformer encoders."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_encoders.data.datamodule import TextDataModule as TextDataModule
    from lit_encoders.modules.lit_clm import LitCLM as LitCLM
    from lit_encoders.modules.lit_encoder import LitEncoder as LitEncoder
    from lit_encoders.modules.lit_kd import LitKD as LitKD
    from lit_encoders.modules.lit_mlm import LitMLM as LitMLM
    from lit_encoders.modules.token_mean import Loss as Loss
    from lit_encoders.objectives.streams import MaskStream as MaskStream

__version__ = "0.1.0"

_HOMES = {
    "LitCLM": "lit_encoders.modules.lit_clm",
    "LitEncoder": "lit_encoders.modules.lit_encoder",
    "LitKD": "lit_encoders.modules.lit_kd",
    "LitMLM": "lit_encoders.modules.lit_mlm",
    "Loss": "lit_encoders.modules.token_mean",
    "MaskStream": "lit_encoders.objectives.streams",
    "TextDataModule": "lit_encoders.data.datamodule",
}
__all__ = ["__version__", *_HOMES]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    # Importing the package must not import torch: `lit-encoders --help` would wait seconds for it.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
