"""Tokens per second of training, validation and exports left out."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override


class Throughput(Callback):
    """Log ``train/tokens_per_second`` and ``train/seconds`` (time in training steps so far).

    Needs a module that counts its tokens in an attribute ``tokens``. On a GPU the clock follows the host, which the
    device holds up once its queue is full: right over many steps, not over one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self._mark: float | None = None
        self._logged = (0, 0.0)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not hasattr(pl_module, "tokens"):
            raise TypeError(
                f"Throughput needs a module with an attribute `tokens`; add one to {type(pl_module).__name__}"
            )
        self._logged = (pl_module.tokens, self.seconds)  # type: ignore[assignment]

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._mark is None:
            self._mark = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        assert self._mark is not None
        self.seconds += now - self._mark
        # From here, so that waiting for data counts, unless something else comes in between.
        self._mark = now
        if trainer.global_step % trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        tokens, seconds = self._logged
        if pl_module.tokens > tokens:  # type: ignore[operator]
            self._logged = (pl_module.tokens, self.seconds)  # type: ignore[assignment]
            pl_module.log("train/tokens_per_second", (self._logged[0] - tokens) / (self.seconds - seconds))
            pl_module.log("train/seconds", self.seconds)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._mark = None

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._mark = None

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seconds = state_dict["seconds"]
