"""Checkpoints in the run folder, only where an optimizer step is complete."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from lit_encoders.callbacks.objective_schedule import find_schedule


class WindowCheckpoint(ModelCheckpoint):
    """Keep the newest state in ``checkpoints/last.ckpt`` of the run folder, at the end of a run without schedule too.

    Lightning's own class saves in the middle of an accumulation window after a resumed start, over the good file.

    Args:
        every_n_steps: optimizer steps between two checkpoints, at least 1.
    """

    def __init__(self, every_n_steps: int = 1000) -> None:
        if every_n_steps < 1:
            raise ValueError(f"WindowCheckpoint.every_n_steps must be at least 1, got {every_n_steps}")
        super().__init__(
            filename="last",
            save_top_k=1,
            every_n_train_steps=every_n_steps,
            save_on_train_epoch_end=False,
            enable_version_counter=False,
        )

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.dirpath is None:
            self.dirpath = str(Path(trainer.default_root_dir) / "checkpoints")
        super().setup(trainer, pl_module, stage)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A schedule keeps each phase's end, the last one's too.
        if find_schedule(trainer) is None and self.dirpath is not None and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            trainer.save_checkpoint(Path(self.dirpath) / "last.ckpt", weights_only=False)
