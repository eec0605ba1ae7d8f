"""What measures every so many optimizer steps and at the end, and puts its figures where the step stands."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override


def log_now(trainer: Trainer, module: LightningModule, metrics: Mapping[str, float]) -> None:
    """Log figures at the step that is over.

    Lightning's own `log` would repeat the newest figure at every logged step until there is another one.

    Args:
        trainer: with the loggers.
        module: so that other callbacks can look at the figures.
        metrics: by name.
    """
    module.log_dict(dict(metrics), logger=False)
    for logger in trainer.loggers:
        logger.log_metrics(dict(metrics), trainer.global_step)


class PeriodicCallback(Callback):
    """Call `record` after every so many optimizer steps, and once more at the end of the run.

    Args:
        every_n_steps: optimizer steps between two records, at least 1.

    Raises:
        ValueError: the number is out of its range.
    """

    def __init__(self, every_n_steps: int) -> None:
        super().__init__()
        if every_n_steps < 1:
            raise ValueError(f"{type(self).__name__}.every_n_steps must be at least 1, got {every_n_steps}")
        self.every_n_steps = every_n_steps
        self._step = 0
        self._recorded = -1

    @abstractmethod
    def record(self, trainer: Trainer, module: LightningModule) -> dict[str, float]:
        """Measure at the step that is over; every rank has to come along.

        Returns:
            Figures to log, by name.
        """

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._step = trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Only the micro-batch that brought the step.
        if trainer.global_step > self._step and trainer.global_step % self.every_n_steps == 0:
            self._recorded = trainer.global_step
            log_now(trainer, pl_module, self.record(trainer, pl_module))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.fast_dev_run or self._recorded == trainer.global_step:  # type: ignore[attr-defined]
            return
        self._recorded = trainer.global_step
        figures = self.record(trainer, pl_module)
        # Here Lightning lets nothing be logged by a module.
        for logger in trainer.loggers:
            logger.log_metrics(figures, trainer.global_step)
