"""Run folders as runs leave them, a few numbers in each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from torch.utils.tensorboard import SummaryWriter

PHASES = [("detour", "clm", 4), ("decay", "mlm", 2)]
TOKENS_PER_STEP = 100


def write_logs(folder: Path, steps: range, purge: int | None = None, offset: float = 0.0) -> None:
    """Log as a run does: training at the step before, held-out losses at the steps done, once more against tokens."""
    with SummaryWriter(str(folder / "logs"), purge_step=purge) as log:
        if not steps.start:
            log.add_scalar("val/mlm_loss", 10.0 + offset, 0)
            log.add_scalar("tokens/val/mlm_loss", 10.0 + offset, 0)
        for step in steps:
            objective = "clm" if step < PHASES[0][2] else "mlm"
            log.add_scalar(f"train/{objective}_loss", 9.0 + offset - step, step)
            log.add_scalar("train/tokens", TOKENS_PER_STEP * (step + 1), step)
            log.add_scalar("train/objective", float(objective == "clm"), step)
            if step % 2:
                log.add_scalar("val/mlm_loss", 9.5 + offset - step, step + 1)
                log.add_scalar("tokens/val/mlm_loss", 9.5 + offset - step, TOKENS_PER_STEP * (step + 1))


def write_checkpoint(folder: Path, name: str, step: int) -> None:
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "checkpoints" / f"{name}.json").write_text(json.dumps({"step": step, "ended": False, "files": {}}))


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """A run of 6 steps, whose phases are a detour of 4 and a decay of 2."""

    def make(name: str = "run", *, finished: bool = True, offset: float = 0.0, **model: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        config = {
            "seed_everything": 0,
            "model": {"class_path": "lit_encoders.LitMLM", "init_args": {"backbone": "B", "mask_ratio": 0.15, **model}},
            "trainer": {"default_root_dir": str(folder), "max_epochs": -1},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        write_logs(folder, range(6 if finished else 5), offset=offset)
        write_checkpoint(folder, "detour", 4)
        if finished:
            phases = [
                {
                    "name": phase,
                    "objective": objective,
                    "steps": steps,
                    "tokens": TOKENS_PER_STEP * steps,
                    "tokens_per_second": 12.5,
                    "losses": {"val/mlm_loss": [10.0, 6.5]},
                }
                for phase, objective, steps in PHASES
            ]
            summary = {"phases": phases, "steps": 6, "tokens": 600, "epochs": 0.5, "precision": "32-true"}
            (folder / "summary.json").write_text(json.dumps({**summary, "export": None, "reverted": None}))
        return folder

    return make


@pytest.fixture
def add_image() -> Callable[..., None]:
    def add(folder: Path, tag: str, step: int) -> None:
        with SummaryWriter(str(folder / "logs")) as log:
            log.add_image(tag, np.zeros((3, 4, 4), dtype=np.uint8), step)

    return add
