"""Going on costs the same at any step: the window that the place is in is planned, and no other."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from lit_encoders import LitMLM, TextDataModule
from lit_encoders.callbacks import ExactResume
from lit_encoders.data.packs import PackPlan


class FirstStep(Callback):
    """When the first step began, and how many windows had been planned by then."""

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if not hasattr(self, "seconds"):
            self.seconds = time.perf_counter()
            self.windows = trainer.datamodule.train_plan.window.cache_info().misses  # type: ignore[attr-defined]


def test_steps_10_and_100_000_resume_alike(
    bert_folder: Path, text_file: Path, make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    def fit(steps: int, *callbacks: Callback, ckpt: Path | None = None) -> float:
        data = TextDataModule(str(text_file), sequence_length=48, slots=96, val_share=0.1)
        settings: dict[str, Any] = {"enable_checkpointing": True, "limit_val_batches": 0, "max_steps": steps}
        began = time.perf_counter()
        make_trainer(callbacks=list(callbacks), **settings).fit(LitMLM(str(bert_folder)), data, ckpt_path=ckpt)
        assert isinstance(data.train_plan, PackPlan)
        packs.append(data.train_plan.num_packs(0))
        return began

    packs: list[int] = []
    fit(10, ExactResume(every_n_steps=10))
    early = tmp_path / "checkpoints" / "step-00000010.ckpt"
    late = tmp_path / "late.ckpt"
    saved = torch.load(early, weights_only=True)
    # About where 100,000 steps of one pack lead; in mid-epoch: at its end the next one is planned too.
    saved["TextDataModule"]["position"] = [100_000 // packs[0], 0, packs[0] // 2]
    torch.save(saved, late)
    found = {}
    for name, path in {"early": early, "late": late}.items():
        first = FirstStep()
        began = fit(11, first, ckpt=path)
        found[name] = (first.seconds - began, first.windows)
    assert [windows for _, windows in found.values()] == [1, 1]
    assert abs(found["early"][0] - found["late"][0]) < 2
