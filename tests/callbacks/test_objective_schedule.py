"""ObjectiveSchedule and CLMDetour: phases in optimizer steps, exact rates, an untouched optimizer at the switch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_encoders import LitMLM, TextDataModule
from lit_encoders.callbacks import CLMDetour, ExactResume, ObjectiveSchedule, Phase
from lit_encoders.callbacks.objective_schedule import phase_at, resolve_phases

MakeTrainer = Callable[..., Trainer]


@pytest.fixture
def data(text_file: Path) -> TextDataModule:
    return TextDataModule(str(text_file), sequence_length=48, slots=96, val_share=0.1)


class Recorder(Callback):
    """What each micro-batch was trained with."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, str, float, float]] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.rows.append((trainer.global_step, pl_module.objective, pl_module.mask_ratio, rate))


def test_r07_rates_of_a_warm_up_and_a_decay() -> None:
    phases = resolve_phases(
        [Phase("a", "clm", steps=6, warmup_steps=2), Phase("b", "mlm", steps=4, shape="one_minus_sqrt")]
    )
    rates = [phase_at(phases, step).factor(step) for step in range(12)]
    assert rates == pytest.approx([0, 0.5, 1, 1, 1, 1, 1, 0.5, 0.293, 0.134, 0, 0], abs=5e-4)


def test_a_budget_in_tokens_becomes_steps_once() -> None:
    phases = [Phase("a", "clm", share=1.0, warmup_tokens=2e3), Phase("b", "mlm", share=0.1)]
    resolved = resolve_phases(phases, tokens=1e5, slots_per_step=1024)
    assert [(p.start, p.stop, p.warmup_steps) for p in resolved] == [(0, 98, 2), (98, 108, 0)]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_detour_is_followed_by_a_tenth_of_it(
    bert_folder: Path, data: TextDataModule, make_trainer: MakeTrainer, accumulate: int
) -> None:
    """F10: phases count optimizer steps, whatever the accumulation."""
    recorder = Recorder()
    module = LitMLM(str(bert_folder), learning_rate=1e-3, mask_ratio=0.4)
    callbacks = [CLMDetour(steps=100, warmup_steps=0), recorder]
    trainer = make_trainer(callbacks=callbacks, accumulate_grad_batches=accumulate, limit_val_batches=0)
    trainer.fit(module, data)
    assert trainer.global_step == 110
    assert len(recorder.rows) == 110 * accumulate
    assert [row[1] for row in recorder.rows] == ["clm"] * 100 * accumulate + ["mlm"] * 10 * accumulate
    assert {row[2] for row in recorder.rows[100 * accumulate :]} == {0.15}
    rates = [row[3] / 1e-3 for row in recorder.rows[100 * accumulate :: accumulate]]
    assert rates == pytest.approx([0.1 + 0.9 * (1 - (t / 10) ** 0.5) for t in range(10)])


def test_the_switch_leaves_optimizer_state_alone(
    bert_folder: Path, data: TextDataModule, make_trainer: MakeTrainer
) -> None:
    class Moments(Callback):
        before: dict[int, Any]
        checked = False

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 5:
                self.before = copy.deepcopy(trainer.optimizers[0].state_dict()["state"])

        def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
            if trainer.global_step == 5:
                assert pl_module.objective == "mlm"
                after = optimizer.state_dict()["state"]
                assert self.before.keys() == after.keys()
                for number, state in self.before.items():
                    assert all(torch.equal(state[key], after[number][key]) for key in state)
                self.checked = True

    moments = Moments()
    trainer = make_trainer(callbacks=[CLMDetour(steps=5, decay_share=0.4), moments], limit_val_batches=0)
    trainer.fit(LitMLM(str(bert_folder)), data)
    assert moments.checked


def test_the_twin_sees_the_same_packs(bert_folder: Path, text_file: Path, make_trainer: MakeTrainer) -> None:
    def packs(schedule: Callback) -> list[Any]:
        class Packs(Callback):
            seen: list[Any]

            def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
                self.seen.append((batch.here, batch.input_ids.tolist()))

        recorder = Packs()
        recorder.seen = []
        data = TextDataModule(str(text_file), sequence_length=48, slots=96, val_share=0.1)
        trainer = make_trainer(callbacks=[schedule, recorder], limit_val_batches=0)
        trainer.fit(LitMLM(str(bert_folder)), data)
        return recorder.seen

    detour = packs(CLMDetour(steps=6, decay_share=0.5))
    assert detour == packs(CLMDetour(steps=6, decay_share=0.5, detour="mlm", detour_mask_ratio=0.3))


def test_each_phase_is_validated_and_kept(
    bert_folder: Path, data: TextDataModule, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    class Validations(Callback):
        def __init__(self) -> None:
            self.steps: list[int] = []

        def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
            self.steps.append(trainer.global_step)

    validations = Validations()
    schedule = CLMDetour(steps=4, decay_share=0.5, head_warmup_steps=3)
    callbacks = [validations, schedule, ExactResume()]
    settings = {"accumulate_grad_batches": 2, "num_sanity_val_steps": -1, "enable_checkpointing": True}
    trainer = make_trainer(callbacks=callbacks, **settings)
    trainer.fit(LitMLM(str(bert_folder)), data)
    assert validations.steps == [0, 3, 7, 9]
    kept = {path.name: torch.load(path, weights_only=True) for path in (tmp_path / "checkpoints").glob("*.ckpt")}
    assert {name: saved["global_step"] for name, saved in kept.items()} == {
        "head_warmup.ckpt": 3,
        "detour.ckpt": 7,
        "decay.ckpt": 9,
    }
    assert all(saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["ready"] for saved in kept.values())


def test_a_phase_s_end_does_not_wait_for_an_epoch_that_validates(
    bert_folder: Path, text_file: Path, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    """Also with a short accumulation window at an epoch's end: 6 batches an epoch, 4 to a step."""
    data = TextDataModule(str(text_file), sequence_length=48, slots=96, val_share=0.2)
    settings = {"check_val_every_n_epoch": 3, "limit_train_batches": 6, "accumulate_grad_batches": 4, "max_epochs": 9}
    callbacks = [CLMDetour(steps=2, decay_share=0.5), ExactResume()]
    trainer = make_trainer(callbacks=callbacks, enable_checkpointing=True, **settings)
    trainer.fit(LitMLM(str(bert_folder)), data)
    saved = {name: torch.load(tmp_path / "checkpoints" / f"{name}.ckpt") for name in ("detour", "decay")}
    assert {name: checkpoint["global_step"] for name, checkpoint in saved.items()} == {"detour": 2, "decay": 3}
    assert trainer.check_val_every_n_epoch == 3


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"slots": 192}, "data.slots 96, got 192"),
        ({"val_share": 0.3}, "data.text "),
        ({"seed": 5}, "data.seed 0, got 5"),
    ],
)
def test_a_checkpoint_goes_on_with_its_own_data_only(
    bert_folder: Path, text_file: Path, make_trainer: MakeTrainer, tmp_path: Path, changed: Any, message: str
) -> None:
    def fit(ckpt_path: Path | None, **settings: Any) -> None:
        data = TextDataModule(
            str(text_file), **{"sequence_length": 48, "slots": 96, "val_share": 0.1, "seed": 0, **settings}
        )
        callbacks = [CLMDetour(steps=2, decay_share=0.5), ExactResume()]
        trainer = make_trainer(callbacks=callbacks, enable_checkpointing=True, limit_val_batches=0)
        trainer.fit(LitMLM(str(bert_folder)), data, ckpt_path=ckpt_path)

    fit(None)
    with pytest.raises(ValueError, match=message):
        fit(tmp_path / "checkpoints" / "detour.ckpt", **changed)
    with pytest.raises(ValueError, match=r"must have steps beyond the checkpoint's 3, got 3"):
        fit(tmp_path / "checkpoints" / "decay.ckpt")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_resumed_from_a_phase_ends_bit_equal(
    bert_folder: Path, text_file: Path, make_trainer: MakeTrainer, tmp_path: Path, accumulate: int
) -> None:
    """U04, R06: order, masks, dropout and rates go on as if nothing had happened, with another number of workers."""

    def fit(workers: int, ckpt_path: Path | None, folder: str) -> dict[str, torch.Tensor]:
        module = LitMLM(str(bert_folder), learning_rate=1e-2)
        data = TextDataModule(str(text_file), sequence_length=48, slots=96, val_share=0.1, num_workers=workers)
        trainer = make_trainer(
            callbacks=[CLMDetour(steps=6, decay_share=0.5), ExactResume()],
            enable_checkpointing=True,
            default_root_dir=tmp_path / folder,
            accumulate_grad_batches=accumulate,
        )
        trainer.fit(module, data, ckpt_path=ckpt_path)
        assert trainer.global_step == 9
        assert module.backbone is not None
        return module.backbone.state_dict()

    whole = fit(0, None, "whole")
    resumed = fit(2, tmp_path / "whole" / "checkpoints" / "detour.ckpt", "resumed")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_fork_may_change_what_is_to_come_only(
    bert_folder: Path, text_file: Path, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    """From the end of the detour: another decay keeps moments and position; another detour is refused."""

    def fit(folder: str, ckpt_path: Path | None, module: LitMLM | None = None, **settings: Any) -> list[float]:
        recorder = Recorder()
        data = TextDataModule(str(text_file), sequence_length=48, slots=96, val_share=0.1)
        schedule = CLMDetour(**{"steps": 6, "decay_share": 0.5, **settings})
        settings = {"default_root_dir": tmp_path / folder, "enable_checkpointing": True}
        trainer = make_trainer(callbacks=[schedule, recorder, ExactResume()], **settings)
        trainer.fit(module or LitMLM(str(bert_folder)), data, ckpt_path=ckpt_path)
        return [row[0] for row in recorder.rows]

    fit("whole", None)
    checkpoint = tmp_path / "whole" / "checkpoints" / "detour.ckpt"
    assert fit("fork", checkpoint, decay_share=0.8, decay_mask_ratio=0.3) == [6, 7, 8, 9, 10]
    with pytest.raises(ValueError, match=r"passed must stay as they were: 'detour' was stop 6, got 7"):
        fit("other", checkpoint, steps=7)
    config = {
        "model_type": "bert", "vocab_size": 95, "hidden_size": 16, "num_hidden_layers": 3,
        "num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 128,
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"the checkpoint must be of this model: .* of another shape"):
        fit("other", checkpoint, LitMLM(config, tokenizer=str(bert_folder)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": -5}, "schedule.steps must be above 0, got -5"),
        ({"tokens": -1e9}, "schedule.tokens must be above 0"),
        ({"steps": 5, "tokens": 5.0}, "exactly one of steps and tokens"),
        ({"steps": 5, "decay_share": 1.0}, r"schedule.decay_share must be in \[0, 1\), got 1.0"),
        ({"steps": 5, "decay_share": -0.1}, r"schedule.decay_share must be in \[0, 1\)"),
        ({"steps": 5, "decay_mask_ratio": 0.0}, r"mask_ratio must be in \(0, 1\], got 0.0"),
        ({"steps": 5, "detour": "rtd"}, "objective must be 'mlm' or 'clm', got 'rtd'"),
        ({"steps": 5, "warmup_steps": 9}, "warm-up must fit in the phase's 5 steps, got 9"),
    ],
)
def test_schedules_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CLMDetour(**settings)


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ([], "at least one"),
        ([Phase("a", "clm", steps=1), Phase("a", "mlm", steps=1)], "names that differ"),
        ([Phase("a", "clm", share=0.5)], "a share needs the schedule's steps or tokens"),
        ([Phase("a", "clm", steps=0)], "at least one step"),
    ],
)
def test_phases_that_cannot_be(phases: list[Phase], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ObjectiveSchedule(phases)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of share, steps and tokens"),
        ({"steps": 1, "share": 1.0}, "exactly one of share, steps and tokens"),
        ({"steps": -1}, "steps must be at least 0, got -1"),
        ({"steps": 1, "shape": "cubic"}, "shape must be one of"),
        ({"steps": 1, "final_share": 2.0}, r"final_share must be in \[0, 1\]"),
        ({"steps": 1, "warmup_steps": 1, "warmup_tokens": 1.0}, "exclude each other"),
    ],
)
def test_a_phase_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Phase("a", "clm", **fields)


@pytest.mark.parametrize(
    ("trainer_settings", "message"),
    [
        ({"max_steps": 50}, "equal the schedule's 110 steps, got 50"),
        ({"max_epochs": 1}, "schedule's 110 steps: 1 epochs are"),
    ],
)
def test_limits_that_contradict_the_schedule(
    bert_folder: Path, data: TextDataModule, make_trainer: MakeTrainer, trainer_settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(callbacks=[CLMDetour(steps=100)], **trainer_settings).fit(LitMLM(str(bert_folder)), data)


def test_a_scheduler_beside_a_schedule(bert_folder: Path, data: TextDataModule, make_trainer: MakeTrainer) -> None:
    module = LitMLM(str(bert_folder), lr_scheduler=torch.optim.lr_scheduler.ConstantLR)
    with pytest.raises(ValueError, match=r"model\.lr_scheduler must be unset beside a schedule"):
        make_trainer(callbacks=[CLMDetour(steps=100)]).fit(module, data)


def test_a_module_without_objective(make_trainer: MakeTrainer) -> None:
    class Plain(LightningModule):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise AssertionError

        def configure_optimizers(self) -> None:
            return None

    with pytest.raises(TypeError, match="needs a module with an attribute `objective`"):
        make_trainer(callbacks=[CLMDetour(steps=10)]).fit(Plain(), [torch.zeros(1)])


def test_a_curve_of_one_s_own(bert_folder: Path, data: TextDataModule, make_trainer: MakeTrainer) -> None:
    class Alternating(CLMDetour):
        def factor(self, phase: Any, step: int) -> float:
            return super().factor(phase, step) * (1.0 if step % 2 else 0.5)

    recorder = Recorder()
    callbacks = [Alternating(steps=4, warmup_steps=0, decay_share=0.0), recorder]
    make_trainer(callbacks=callbacks, limit_val_batches=0).fit(LitMLM(str(bert_folder), learning_rate=1e-3), data)
    assert [row[3] for row in recorder.rows] == pytest.approx([5e-4, 1e-3, 5e-4, 1e-3])
