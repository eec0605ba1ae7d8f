"""Checkpoints that a run goes on from as if it had never stopped, and stopping when a signal asks for it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from lit_encoders.callbacks.objective_schedule import find_schedule
from lit_encoders.models.sharding import fill_state_
from lit_encoders.objectives.hashing import Purpose, resolve_seed, single_key
from lit_encoders.resume.stops import STOPPED, RunStoppedError, StopFlag, stop_signals
from lit_encoders.resume.store import forget_old, remove_leftovers, save_checkpoint, step_path

CHECKPOINTS = "checkpoints"


class ExactResume(Checkpoint):
    """Keep checkpoints from which a killed run gives the very weights that it would have given.

    They are written only where an optimizer step is complete, and after the validation of that step:
    ``checkpoints/step-N.ckpt`` every so many steps, the newest ones kept, and the end of each phase by its name. Every
    parameter has optimizer state from the first step on, and generators (dropout) are seeded anew before each batch
    from (seed, step, batch), so that nothing is left that a checkpoint would have to hold.

    SIGTERM, Ctrl-C, and SIGUSR1 under SLURM are noted; the step at hand is finished, a checkpoint written, and the run
    ends with exit code 75 (under SLURM's SIGUSR1 it is requeued first). A second Ctrl-C ends it at once.

    Works on any LightningModule whose data knows its place: a datamodule with ``state_dict`` (`TextDataModule`), or a
    loader with one and a length (torchdata's StatefulDataLoader).

    Args:
        every_n_steps: optimizer steps between two checkpoints, at least 1.
        keep: how many of these to keep, at least 2: should the newest be damaged, there is one before.
        on_signals: whether signals stop the run.
        requeue: whether a job that SLURM is about to end goes back into its queue.

    Raises:
        ValueError: a setting is out of its range, or a checkpoint was made with other numbers of packs in a step.
        TypeError: nothing saves the place in the data.
        RunStoppedError: a signal came, or a checkpoint cannot be written.
    """

    def __init__(self, every_n_steps: int = 1000, keep: int = 2, on_signals: bool = True, requeue: bool = True) -> None:
        super().__init__()
        if every_n_steps < 1:
            raise ValueError(f"ExactResume.every_n_steps must be at least 1, got {every_n_steps}")
        if keep < 2:
            raise ValueError(f"ExactResume.keep must be at least 2, got {keep}")
        self.every_n_steps = every_n_steps
        self.keep = keep
        self.on_signals = on_signals
        self.requeue = requeue
        self.flag = StopFlag()
        self._group: Any = None
        # The step of the newest checkpoint, and the one after whose validation there is one to write.
        self._saved = -1
        self._waiting = -1
        self._validation_due = False
        self._trained = False
        self._step = 0

    # ---- where it stands -------------------------------------------------------------------------------------------

    def folder(self, trainer: Trainer) -> Path:
        """Where checkpoints stand."""
        return Path(trainer.default_root_dir) / CHECKPOINTS

    def path(self, trainer: Trainer, step: int) -> Path:
        """Where the checkpoint of a step stands: a phase's end has the phase's name."""
        schedule = find_schedule(trainer)
        ending = None if schedule is None else schedule.ending_at(step)
        return step_path(self.folder(trainer), step) if ending is None else self.folder(trainer) / f"{ending.name}.ckpt"

    def _due(self, trainer: Trainer, step: int) -> bool:
        return step % self.every_n_steps == 0 or not self.path(trainer, step).name.startswith("step-")

    # ---- hooks -----------------------------------------------------------------------------------------------------

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._listen(trainer)

    def _listen(self, trainer: Trainer) -> None:
        """Take signals over from Lightning, whose own handlers save in the middle of a step, or end it."""
        connector = trainer._signal_connector
        if not self.on_signals or self.flag.installed:
            return
        self.flag.install(stop_signals())
        if connector.received_sigterm:
            # It came between Lightning's handlers and these.
            connector.received_sigterm = False
            self.flag.received = signal.SIGTERM

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._check_data(trainer)
        for optimizer in trainer.optimizers:
            fill_state_(optimizer, [parameter for group in optimizer.param_groups for parameter in group["params"]])
        self._saved = trainer.global_step if trainer.ckpt_path is not None else -1
        self._trained = False
        self._listen(trainer)
        if trainer.world_size > 1 and isinstance(trainer.strategy, ParallelStrategy):
            # On the CPU: asking must not wait for the device.
            self._group = torch.distributed.new_group(backend="gloo")
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            remove_leftovers(self.folder(trainer))
        if self._asked_to_stop(trainer):
            assert self.flag.received is not None
            raise RunStoppedError(
                f"stopped by {self.flag.received.name} before a step was trained; the same command begins there again",
                STOPPED,
            )
        if self._validation_due:
            self._validation_due = False
            self._waiting = trainer.global_step if self._due(trainer, trainer.global_step) else -1
            _validate(trainer)

    def _check_data(self, trainer: Trainer) -> None:
        datamodule = getattr(trainer, "datamodule", None)
        if datamodule is not None and is_overridden("state_dict", datamodule):
            return
        combined = trainer.fit_loop._combined_loader
        # Not by its truth: that would ask an endless loader for its length.
        for loader in [] if combined is None else combined.flattened:
            # Of a loader without length Lightning fetches a batch ahead, so that its state would be of the next one.
            if not all(hasattr(loader, name) for name in ("state_dict", "load_state_dict", "__len__")):
                raise TypeError(
                    "ExactResume needs data that knows its place: a datamodule with state_dict (TextDataModule), or a "
                    "loader with state_dict and a length (torchdata's StatefulDataLoader), got "
                    f"{type(loader).__name__}"
                )

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._step = trainer.global_step
        seed_batch(resolve_seed(None), self._step, batch_idx, trainer.global_rank)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        # Not by the batch's number: the last window of an epoch may be a short one.
        if step == self._step or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self._trained = True
        if self._asked_to_stop(trainer):
            # The validation of this step may take longer than there is time: the resumed run begins with it.
            self._validation_due = _validates_now(trainer)
            path = step_path(self.folder(trainer), step) if self._validation_due else self.path(trainer, step)
            self._save(trainer, path)
            self._stop(trainer, step, path)
        elif self._due(trainer, step):
            if _validates_now(trainer):
                self._waiting = step
            else:
                self._save(trainer, self.path(trainer, step))

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit" or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if self._waiting == trainer.global_step:
            self._waiting = -1
            self._save(trainer, self.path(trainer, trainer.global_step))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Without a schedule, whose last phase has its own, a run would end without one.
        if self._trained and self._saved != trainer.global_step:
            self._save(trainer, self.path(trainer, trainer.global_step))

    def _save(self, trainer: Trainer, path: Path) -> None:
        step = trainer.global_step
        ended = 0 <= trainer.max_steps <= step and not self._validation_due
        self._saved = step
        save_checkpoint(trainer, path, ended)
        if trainer.is_global_zero:
            forget_old(path.parent, self.keep)

    # ---- signals ---------------------------------------------------------------------------------------------------

    def _asked_to_stop(self, trainer: Trainer) -> bool:
        asked = int(self.flag.received or 0)
        if self._group is not None:
            # Ranks are asked at different moments, and have to stop at the same step.
            every = torch.tensor([asked])
            torch.distributed.all_reduce(every, op=torch.distributed.ReduceOp.MAX, group=self._group)
            asked = int(every)
            self.flag.received = signal.Signals(asked) if asked else None
        return asked != 0

    def _stop(self, trainer: Trainer, step: int, path: Path) -> None:
        assert self.flag.received is not None
        name = self.flag.received.name
        requeued = ""
        if name == "SIGUSR1" and self.requeue and trainer.is_global_zero:
            requeued = requeue_job()
        raise RunStoppedError(
            f"stopped by {name} after step {step}{requeued}; the same command goes on from '{path}'", STOPPED
        )

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._release()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._release()

    def _release(self) -> None:
        self.flag.restore()
        self.flag = StopFlag()
        self._group = None

    # ---- state -----------------------------------------------------------------------------------------------------

    @property
    @override
    def state_key(self) -> str:
        # Another interval or number of files changes nothing of what a checkpoint means.
        return "ExactResume"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"validation_due": self._validation_due}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._validation_due = bool(state_dict["validation_due"])

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["exact_resume"] = {"batches": trainer.accumulate_grad_batches, "ranks": trainer.world_size}

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get("exact_resume")
        if saved is None or trainer.state.fn != "fit":
            return
        batches, ranks = trainer.accumulate_grad_batches, trainer.world_size
        if saved["batches"] * saved["ranks"] != batches * ranks:
            raise ValueError(
                "a step must have as many micro-batches as in the checkpoint: trainer.accumulate_grad_batches "
                f"{saved['batches']} x {saved['ranks']} ranks, got {batches} x {ranks}"
            )
        if saved["batches"] != batches:
            count_in_other_windows(checkpoint["loops"]["fit_loop"], saved["batches"], batches)


def count_in_other_windows(fit_loop: dict[str, Any], before: int, now: int) -> None:
    """Rewrite Lightning's counts of micro-batches, which are those of one rank, for another accumulation.

    Args:
        fit_loop: state of the loop, at the end of an accumulation window; changed in place.
        before: micro-batches of a step when it was saved.
        now: the same from here on.
    """
    progress = fit_loop["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        # "completed" is one behind where a callback of the batch's end saves.
        behind = counts["ready"] - counts["completed"]
        for name in ("ready", "started", "processed"):
            counts[name] = counts[name] // before * now
        counts["completed"] = counts["ready"] - behind


def seed_batch(seed: int, step: int, batch: int, rank: int) -> None:
    """Seed the generators for one batch, so that what it draws does not depend on what was drawn before.

    Args:
        seed: of the run.
        step: optimizer step.
        batch: micro-batch of the epoch.
        rank: of the process.
    """
    key = single_key(seed, Purpose.DROPOUT, step, batch, rank)
    torch.manual_seed(key >> 1)
    np.random.seed(key & 0xFFFFFFFF)
    random.seed(key)


def requeue_job() -> str:
    """Send this SLURM job back into its queue; what came of it, for a message."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
    except OSError as error:
        return f", and could not be requeued ({error})"
    if done.returncode:
        return f", and could not be requeued ({done.stderr.strip() or done.returncode})"
    rank_zero_info(f"job {job} is requeued")
    return ", and is requeued"


def _validates_now(trainer: Trainer) -> bool:
    """Whether Lightning validates after the batch that has just been trained."""
    loop = trainer.fit_loop.epoch_loop
    if not trainer.enable_validation or trainer.fit_loop._data_fetcher is None:
        return False
    return bool(loop._should_check_val_fx(trainer.fit_loop._data_fetcher)) and not loop._skip_next_val


def _validate(trainer: Trainer) -> None:
    """Run the validation that a stopped run was about to begin."""
    trainer.validating = True
    trainer.fit_loop.epoch_loop.val_loop.run()
    trainer.training = True
