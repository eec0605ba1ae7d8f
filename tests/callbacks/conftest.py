"""Small runs of a real module, without files of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., Trainer]:
    def make(**settings: Any) -> Trainer:
        defaults: dict[str, Any] = {
            "default_root_dir": tmp_path,
            "accelerator": "cpu",
            "max_epochs": -1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
        }
        return Trainer(**{**defaults, **settings})

    return make
