"""LayerFreezing: nothing of a frozen weight moves, and it goes on exactly where it stood."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer

from lit_encoders import LitMLM, TextDataModule
from lit_encoders.callbacks import LayerFreezing, ObjectiveSchedule, Phase
from lit_encoders.models.layer_range import LayerRange

MakeTrainer = Callable[..., Trainer]


@pytest.fixture
def data(text_file: Path) -> TextDataModule:
    return TextDataModule(str(text_file), sequence_length=48, slots=96, val_share=0.1)


class Snapshots(Callback):
    """Weights and moments of every parameter after each step."""

    def __init__(self) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []
        self.moments: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        self.weights.append({n: p.detach().clone() for n, p in pl_module.named_parameters()})
        state = trainer.optimizers[0].state
        self.moments.append({n: copy.deepcopy(state.get(p, {})) for n, p in pl_module.named_parameters()})


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("optimizer", [None, sgd])
def test_f01_frozen_weights_and_moments_stand_still(
    bert_folder: Path, data: TextDataModule, make_trainer: MakeTrainer, optimizer: Any
) -> None:
    """With weight decay and momentum running: moments from before the freeze must not move a weight either."""
    phases = [Phase("a", "mlm", steps=2), Phase("held", "clm", steps=3), Phase("b", "mlm", steps=1)]
    snapshots = Snapshots()
    module = LitMLM(str(bert_folder), learning_rate=1e-2, weight_decay=0.1, optimizer=optimizer)
    callbacks = [ObjectiveSchedule(phases), LayerFreezing(["0:2", "embeddings"], phases=["held"]), snapshots]
    make_trainer(callbacks=callbacks, limit_val_batches=0).fit(module, data)
    frozen = LayerRange(["0:2", "embeddings"]).parameters(module)
    assert 0 < len(frozen) < len(dict(module.named_parameters()))
    for name in snapshots.weights[0]:
        steps = [torch.equal(a[name], b[name]) for a, b in zip(snapshots.weights, snapshots.weights[1:], strict=False)]
        assert steps == ([False, True, True, True, False] if name in frozen else [False] * 5), name
    for name in frozen:
        before, after = snapshots.moments[1][name], snapshots.moments[4][name]
        assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize(
    ("layers", "phases", "message"),
    [
        ("7:9", None, "match at least one of the model's 3 layers, got '7:9'"),
        ("first", None, "must be like '0:8'"),
        ("0:1", ["warmup"], r"name phases of the schedule \(a\), got 'warmup'"),
    ],
)
def test_ranges_and_phases_that_do_not_exist(
    bert_folder: Path, data: TextDataModule, make_trainer: MakeTrainer, layers: str, phases: Any, message: str
) -> None:
    callbacks = [ObjectiveSchedule([Phase("a", "mlm", steps=2)]), LayerFreezing(layers, phases)]
    with pytest.raises(ValueError, match=message):
        make_trainer(callbacks=callbacks).fit(LitMLM(str(bert_folder)), data)


def test_an_unquoted_range_is_refused(bert_folder: Path, data: TextDataModule, make_trainer: MakeTrainer) -> None:
    with pytest.raises(TypeError, match="must be text in quotes"):
        make_trainer(max_steps=1, callbacks=[LayerFreezing(568)]).fit(LitMLM(str(bert_folder)), data)  # type: ignore[arg-type]
