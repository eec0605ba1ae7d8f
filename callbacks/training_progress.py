"""A progress bar with phase, losses, tokens per second and time left; plain lines where there is no terminal."""

from __future__ import annotations

import sys
import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from typing_extensions import override

from lit_encoders.callbacks.objective_schedule import find_schedule


class TrainingProgress(ProgressBar):
    """Show how far a run is, in optimizer steps.

    Args:
        refresh_seconds: shortest time between two refreshes of the bar; each reads losses from the device.
        line_seconds: the same for the plain lines that are printed where standard error is no terminal.
    """

    def __init__(self, refresh_seconds: float = 0.5, line_seconds: float = 15.0) -> None:
        super().__init__()
        self.refresh_seconds = refresh_seconds
        self.line_seconds = line_seconds
        self._enabled = True
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._shown = 0.0
        self._start = (0.0, 0)

    @override
    def disable(self) -> None:
        self._enabled = False

    @override
    def enable(self) -> None:
        self._enabled = True

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start = (time.perf_counter(), trainer.global_step)
        if not self._enabled or not sys.stderr.isatty():
            return
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._bar.start()
        total = None if trainer.max_steps < 0 else trainer.max_steps
        self._task = self._bar.add_task("", total=total, figures="")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        last = trainer.global_step == trainer.max_steps
        pause = self.line_seconds if self._bar is None else self.refresh_seconds
        if not self._enabled or (now - self._shown < pause and not last):
            return
        self._shown = now
        schedule = find_schedule(trainer)
        phase = "train" if schedule is None else schedule.phase(max(0, trainer.global_step - 1)).name
        figures = self._figures(trainer)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=trainer.global_step, description=phase, figures=figures)
            return
        total = "" if trainer.max_steps < 0 else f"/{trainer.max_steps}"
        print(
            f"{phase}: step {trainer.global_step}{total}  {figures}{self._time_left(trainer)}",
            file=sys.stderr,
            flush=True,
        )

    def _figures(self, trainer: Trainer) -> str:
        metrics = trainer.progress_bar_metrics
        parts = [
            f"{name.removeprefix('train/').replace('_', ' ')} {float(value):.3f}"  # type: ignore[arg-type]
            for name, value in metrics.items()
            if name.startswith("train/") and name.endswith("loss") and self._is_current(trainer, name)
        ]
        speed = trainer.callback_metrics.get("train/tokens_per_second")
        if speed is not None:
            parts.append(f"{float(speed):,.0f} tokens/s")
        return "  ".join(parts)

    @staticmethod
    def _is_current(trainer: Trainer, name: str) -> bool:
        # Losses of an objective that rests stay in Lightning's list; only those of the last step belong in the bar.
        current = getattr(trainer.lightning_module, "logged_losses", None)
        return current is None or name in current

    def _time_left(self, trainer: Trainer) -> str:
        began, first = self._start
        done = trainer.global_step - first
        if trainer.max_steps < 0 or done <= 0:
            return ""
        seconds = (time.perf_counter() - began) / done * (trainer.max_steps - trainer.global_step)
        return f"  {int(seconds) // 60}:{int(seconds) % 60:02d} left"

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
