"""B05: compiling is asked for, never assumed, and changes nothing but speed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_encoders import LitMLM, TextDataModule
from lit_encoders.callbacks import CLMDetour


def test_nothing_is_compiled_unless_asked(bert_folder: Path) -> None:
    module = LitMLM(str(bert_folder))
    module.configure_model()
    assert module.backbone is not None
    assert module.backbone.model.base_model._compiled_call_impl is None


@pytest.mark.slow
def test_a_compiled_detour_ends_with_the_same_loss(
    bert_folder: Path, text_file: Path, make_trainer: Callable[..., Any]
) -> None:
    """Across the switch of direction, which must not leave a stale graph; no graph is added after the first steps."""
    losses = []
    for compiled in (False, True):
        torch._dynamo.reset()
        module = LitMLM(str(bert_folder), learning_rate=1e-2, compile=compiled)
        module.configure_model()
        for dropout in module.modules():
            if isinstance(dropout, torch.nn.Dropout):
                dropout.p = 0.0
        trainer = make_trainer(callbacks=[CLMDetour(steps=6, decay_share=0.5)], limit_val_batches=0)
        trainer.fit(module, TextDataModule(str(text_file), sequence_length=48, slots=96, val_share=0.2))
        losses.append({name: float(value) for name, value in trainer.callback_metrics.items() if "loss" in name})
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 10
