"""ExactResume: what it keeps and when, how it stops, and that any LightningModule goes on bit-equal."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn

from lit_encoders import LitMLM, TextDataModule
from lit_encoders.callbacks import CLMDetour, ExactResume, RunSummary
from lit_encoders.callbacks.exact_resume import count_in_other_windows, requeue_job
from lit_encoders.resume.manifest import manifest_path, read_manifest
from lit_encoders.resume.stops import RunStoppedError
from lit_encoders.resume.store import newest_checkpoint

MakeTrainer = Callable[..., Trainer]


class Signal(Callback):
    """Sends this process a signal in the middle of a step."""

    def __init__(self, step: int, number: int = signal.SIGTERM, times: int = 1) -> None:
        self.step, self.number, self.times = step, number, times

    def on_before_optimizer_step(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step + 1 == self.step:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)


@pytest.fixture
def fit(bert_folder: Path, text_file: Path, make_trainer: MakeTrainer, tmp_path: Path) -> Any:
    def run(*callbacks: Callback, ckpt: Path | None = None, folder: str = "run", **settings: Any) -> dict[str, Tensor]:
        module = LitMLM(str(bert_folder), learning_rate=1e-2)
        data = TextDataModule(str(text_file), sequence_length=48, slots=96, val_share=0.1)
        given = {"default_root_dir": tmp_path / folder, "enable_checkpointing": True, "limit_val_batches": 1}
        trainer = make_trainer(callbacks=list(callbacks), **{**given, **settings})
        trainer.fit(module, data, ckpt_path=ckpt)
        assert module.backbone is not None
        return module.backbone.state_dict()

    return run


def kept(folder: Path) -> dict[str, int]:
    return {p.name: read_manifest(p).step for p in sorted((folder / "checkpoints").glob("*.ckpt"))}


def test_steps_are_kept_by_number_and_phases_by_name(fit: Any, tmp_path: Path) -> None:
    fit(CLMDetour(steps=6, decay_share=0.5), ExactResume(every_n_steps=2), RunSummary())
    # Step 6 is the detour's end: once, and by its name.
    names = {"step-00000004.ckpt": 4, "step-00000008.ckpt": 8, "detour.ckpt": 6, "decay.ckpt": 9}
    assert kept(tmp_path / "run") == names
    ended = [name for name in names if read_manifest(tmp_path / "run" / "checkpoints" / name).ended]
    assert ended == ["decay.ckpt"]
    saved = torch.load(tmp_path / "run" / "checkpoints" / "detour.ckpt", weights_only=True)
    marks = next(state["marks"] for key, state in saved["callbacks"].items() if "RunSummary" in key)
    assert marks[-1]["step"] == 6, "it is written after the validation of its step"
    numbers = saved["optimizer_states"][0]["state"]
    assert len(numbers) == sum(len(group["params"]) for group in saved["optimizer_states"][0]["param_groups"])


@pytest.mark.parametrize("step", [3, 4, 6])
def test_a_signal_stops_between_two_steps(fit: Any, tmp_path: Path, step: int) -> None:
    """At a step of its own, at one that validates, and at a phase's end."""
    schedule: dict[str, Any] = {"steps": 6, "decay_share": 0.5}
    often: dict[str, Any] = {"val_check_interval": 4, "check_val_every_n_epoch": None}
    whole = fit(CLMDetour(**schedule), ExactResume(), RunSummary(), folder="whole", **often)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RunStoppedError, match=rf"^stopped by SIGTERM after step {step}; the same command") as stopped:
        fit(Signal(step), CLMDetour(**schedule), ExactResume(), RunSummary(), **often)
    assert stopped.value.exit_code == 75
    assert signal.getsignal(signal.SIGTERM) == before
    found = newest_checkpoint(tmp_path / "run" / "checkpoints")
    assert found is not None
    assert found.manifest.step == step
    summary = RunSummary()
    resumed = fit(CLMDetour(**schedule), ExactResume(), summary, ckpt=found.path, **often)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert [mark.step for mark in summary.marks] == [4, 6, 8, 9]
    assert (tmp_path / "run" / "checkpoints" / "detour.ckpt").exists()


class Early(Callback):
    """Sends a signal while Lightning's own handlers are in place, or while the first validation runs."""

    def __init__(self, hook: str) -> None:
        self.hook = hook

    def on_fit_start(self, trainer: Trainer, *_: Any) -> None:
        if self.hook == "handlers":
            register = trainer._signal_connector.register_signal_handlers

            def then_signal() -> None:
                register()
                os.kill(os.getpid(), signal.SIGTERM)

            trainer._signal_connector.register_signal_handlers = then_signal  # type: ignore[method-assign]

    def on_validation_batch_start(self, *_: Any) -> None:
        if self.hook == "validation":
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("hook", "sanity"), [("handlers", 0), ("handlers", 1), ("validation", 1)])
def test_a_signal_before_the_first_step(fit: Any, tmp_path: Path, hook: str, sanity: int) -> None:
    with pytest.raises(RunStoppedError, match=r"^stopped by SIGTERM before a step was trained; the same") as stopped:
        fit(Early(hook), ExactResume(), max_steps=2, num_sanity_val_steps=sanity)
    assert stopped.value.exit_code == 75
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_second_ctrl_c_stops_at_once(fit: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):  # Lightning's own end of a run that Ctrl-C broke off.
        fit(Signal(2, signal.SIGINT, times=2), ExactResume(every_n_steps=1), max_steps=4)
    assert kept(tmp_path / "run") == {"step-00000001.ckpt": 1}


def test_signals_can_be_left_alone(fit: Any, tmp_path: Path) -> None:
    class Handlers(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            self.seen = signal.getsignal(signal.SIGINT)

    handlers = Handlers()
    before = signal.getsignal(signal.SIGINT)
    fit(handlers, ExactResume(on_signals=False), max_steps=1)
    assert handlers.seen == before


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("#!/bin/sh\necho $2 > asked\n", ", and is requeued"),
        ("#!/bin/sh\necho no such job >&2\nexit 1\n", ", and could not be requeued (no such job)"),
        (None, ", and could not be requeued (["),
    ],
)
def test_a_slurm_job_goes_back_into_its_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path) if script is None else f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "12")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    if script is not None:
        (tmp_path / "scontrol").write_text(script)
        (tmp_path / "scontrol").chmod(0o755)
    assert requeue_job().startswith(said)
    if said.endswith("is requeued"):
        assert (tmp_path / "asked").read_text().strip() == "12_3"


class Numbers:
    """Shuffled numbers that know their place."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            self.place += 1
            yield torch.full((2, 4), float(self.place % 7))

    def __len__(self) -> int:
        return 1000

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Plain(pl.LightningModule):
    """A module of another project, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return (self.layers(batch) - 1).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def test_u04_any_module_goes_on_bit_equal(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """U14: a seed that is set before the resume changes nothing."""

    def run(steps: int, folder: str, ckpt: Path | None = None) -> dict[str, Tensor]:
        pl.seed_everything(1, verbose=False)
        torch.rand(3 if ckpt is None else 11)
        module = Plain()
        settings: dict[str, Any] = {"default_root_dir": tmp_path / folder, "enable_checkpointing": True}
        trainer = make_trainer(max_steps=steps, callbacks=[ExactResume()], **settings)
        trainer.fit(module, Numbers(), ckpt_path=ckpt)
        return module.state_dict()

    whole = run(8, "whole")
    run(4, "half")
    resumed = run(8, "half", tmp_path / "half" / "checkpoints" / "step-00000004.ckpt")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_u01_data_that_does_not_know_its_place_is_refused(make_trainer: MakeTrainer) -> None:
    for loader in (torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2), (torch.ones(2, 4) for _ in range(9))):
        trainer = make_trainer(max_steps=2, callbacks=[ExactResume()], enable_checkpointing=True)
        with pytest.raises(TypeError, match=r"ExactResume needs data that knows its place: .*, got (DataL|gen)\w+$"):
            trainer.fit(Plain(), loader)


def test_counts_of_another_accumulation_are_those_that_lightning_writes(fit: Any, tmp_path: Path) -> None:
    states = {}
    for accumulate in (1, 2, 4):
        folder = f"by-{accumulate}"
        fit(ExactResume(every_n_steps=3), max_steps=3, accumulate_grad_batches=accumulate, folder=folder)
        path = tmp_path / folder / "checkpoints" / "step-00000003.ckpt"
        states[accumulate] = torch.load(path, weights_only=True)["loops"]["fit_loop"]
    for before, now in ((1, 2), (4, 2), (2, 4), (4, 1)):
        state = torch.load(tmp_path / f"by-{before}" / "checkpoints" / "step-00000003.ckpt", weights_only=True)
        changed = state["loops"]["fit_loop"]
        count_in_other_windows(changed, before, now)
        assert changed["epoch_loop.batch_progress"] == states[now]["epoch_loop.batch_progress"]


def test_a_step_of_other_packs_is_refused(fit: Any, tmp_path: Path) -> None:
    fit(ExactResume(every_n_steps=2), max_steps=2)
    path = tmp_path / "run" / "checkpoints" / "step-00000002.ckpt"
    with pytest.raises(ValueError, match=r"trainer.accumulate_grad_batches 1 x 1 ranks, got 2 x 1$"):
        fit(ExactResume(), max_steps=4, accumulate_grad_batches=2, ckpt=path)


def test_u11_callbacks_may_be_in_another_order(fit: Any, tmp_path: Path) -> None:
    whole = fit(CLMDetour(steps=4), ExactResume(every_n_steps=3), RunSummary(), folder="whole")
    path = tmp_path / "whole" / "checkpoints" / "step-00000003.ckpt"
    summary = RunSummary()
    resumed = fit(ExactResume(), summary, CLMDetour(steps=4), ckpt=path)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize(("settings", "line"), [({"every_n_steps": 0}, "at least 1, got 0"), ({"keep": 1}, "2, got 1")])
def test_mistakes(settings: dict[str, int], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        ExactResume(**settings)  # type: ignore[arg-type]


def test_u09_a_checkpoint_holds_plain_types(fit: Any, tmp_path: Path) -> None:
    fit(CLMDetour(steps=2), ExactResume(), RunSummary())
    for path in (tmp_path / "run" / "checkpoints").glob("*.ckpt"):
        torch.load(path, weights_only=True)
        assert manifest_path(path).is_file()
