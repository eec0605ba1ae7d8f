"""LayerFreezing: nothing of a frozen weight moves, and it goes on exactly where it stood."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lit_encoders import LitMLM, TextDataModule
from lit_encoders.callbacks import FreezeWindow, LayerFreezing, ObjectiveSchedule, Phase
from lit_encoders.callbacks.layer_freezing import parse_steps
from lit_encoders.models.layer_range import LayerRange

MakeTrainer = Callable[..., Trainer]
Run = Callable[..., Trainer]


@pytest.fixture
def data(text_file: Path) -> TextDataModule:
    return TextDataModule(str(text_file), sequence_length=48, slots=96, val_share=0.1)


class Snapshots(Callback):
    """Weights and moments of every parameter after each step."""

    def __init__(self) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []
        self.moments: list[dict[str, Any]] = []
        self.requires: list[set[str]] = []
        self._step = -1

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        self.weights.append({n: p.detach().clone() for n, p in pl_module.named_parameters()})
        state = trainer.optimizers[0].state
        self.moments.append({n: copy.deepcopy(state.get(p, {})) for n, p in pl_module.named_parameters()})
        self.requires.append({n for n, p in pl_module.named_parameters() if p.requires_grad})

    def moved(self, name: str, start: Tensor | None = None) -> list[bool]:
        """Whether each step moved a weight."""
        weights = [row[name] for row in self.weights]
        weights = weights if start is None else [start, *weights]
        return [not torch.equal(a, b) for a, b in pairwise(weights)]


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def adam(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1)


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
        assert snapshots.moved(name) == ([True, False, False, False, True] if name in frozen else [True] * 5), name
    for name in frozen:
        before, after = snapshots.moments[1][name], snapshots.moments[4][name]
        assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("optimizer", [adam, sgd])
def test_f01_after_the_window_it_goes_on_as_if_the_steps_had_not_been(
    run: Run, stack: Any, seen: Any, optimizer: Any
) -> None:
    """Against a plain loop, whose frozen weights are simply left out of the middle steps."""
    module, values = stack(optimizer), [1.0, -0.5, 2.0, 0.3, 1.0]
    run(module, values, LayerFreezing("0:2", steps="1:3"), seen)
    plain = {n: nn.Parameter(w.clone()) for n, w in seen.start.items()}
    stepper = optimizer(plain.values())
    for step, value in enumerate(values):
        for name, weight in plain.items():
            rests = name.startswith(("blocks.0", "blocks.1")) and step in (1, 2)
            weight.grad = None if rests else value * module.direction(name)
        stepper.step()
    for name, weight in plain.items():
        torch.testing.assert_close(seen.weights[-1][name], weight.data, rtol=1e-6, atol=1e-6)


def test_the_clipped_norm_is_that_of_what_trains(run: Run, stack: Any, seen: Any) -> None:
    module = stack()
    run(module, [1.0], LayerFreezing(["0:2", "embeddings"], steps=":1"), seen, gradient_clip_val=0.5)
    moved = {n: seen.weights[0][n] - seen.start[n] for n in seen.start}
    trained = {n: m for n, m in moved.items() if n.startswith(("blocks.2", "head"))}
    assert torch.cat([m.flatten() for m in trained.values()]).norm().item() == pytest.approx(0.5, rel=1e-4)
    assert all(not m.any() for n, m in moved.items() if n not in trained)


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_f10_windows_count_optimizer_steps(run: Run, stack: Any, seen: Any, accumulate: int, tmp_path: Path) -> None:
    """Unfrozen at step 3, which is batch 3, 6 or 12; also after a resume at step 2."""
    values = [1.0] * (5 * accumulate)
    snapshots, module = Snapshots(), stack(adam)
    start = {n: p.detach().clone() for n, p in module.named_parameters()}
    settings = {"accumulate_grad_batches": accumulate, "max_epochs": -1}
    run(module, values, LayerFreezing("0:1", steps=":3"), snapshots, **settings, max_steps=5)
    for name, weight in start.items():
        frozen = name.startswith("blocks.0")
        assert snapshots.moved(name, weight) == ([False] * 3 + [True] * 2 if frozen else [True] * 5)
    first = stack(adam)
    trainer = run(first, values, LayerFreezing("0:1", steps=":3"), **settings, max_steps=2)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    second, again = Snapshots(), stack(adam)
    run(again, values, LayerFreezing("0:1", steps=":3"), second, **settings, max_steps=5, ckpt=tmp_path / "two.ckpt")
    assert len(second.weights) == 3
    for row, other in zip(second.weights, snapshots.weights[2:], strict=True):
        assert all(torch.equal(row[name], other[name]) for name in row)


WINDOWS = [FreezeWindow("0:1", steps=":4"), FreezeWindow("1:2", steps=":2"), FreezeWindow("embeddings", steps="1:2")]


def test_f04_gradual_unfreezing_resumed_in_the_middle(run: Run, stack: Any, tmp_path: Path) -> None:
    whole, module = Snapshots(), stack(adam)
    start = {n: p.detach().clone() for n, p in module.named_parameters()}
    run(module, [1.0] * 6, LayerFreezing(windows=WINDOWS), whole)
    expected = {"blocks.0": [False] * 4 + [True] * 2, "blocks.1": [False] * 2 + [True] * 4,
                "embed": [True, False, True, True, True, True]}  # fmt: skip
    for name in start:
        wanted = next((moved for prefix, moved in expected.items() if name.startswith(prefix)), [True] * 6)
        assert whole.moved(name, start[name]) == wanted, name
    trainer = run(stack(adam), [1.0] * 6, LayerFreezing(windows=WINDOWS), max_steps=3, max_epochs=-1)
    trainer.save_checkpoint(tmp_path / "three.ckpt")
    rest = Snapshots()
    settings: dict[str, Any] = {"max_epochs": -1, "max_steps": 6, "ckpt": tmp_path / "three.ckpt"}
    run(stack(adam), [1.0] * 6, LayerFreezing(windows=WINDOWS), rest, **settings)
    for row, other in zip(rest.weights, whole.weights[3:], strict=True):
        assert all(torch.equal(row[name], other[name]) for name in row)
    for row, other in zip(rest.moments, whole.moments[3:], strict=True):
        assert all(torch.equal(row[name][key], other[name][key]) for name in row for key in row[name])


def test_f03_a_resume_after_the_window_freezes_nothing(run: Run, stack: Any, tmp_path: Path) -> None:
    window = {"layers": "0:2", "steps": ":1"}
    trainer = run(stack(adam), [1.0] * 4, LayerFreezing(**window), max_steps=2, max_epochs=-1)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    whole, rest, module = Snapshots(), Snapshots(), stack(adam)
    run(stack(adam), [1.0] * 4, LayerFreezing(**window), whole)
    settings: dict[str, Any] = {"max_epochs": -1, "max_steps": 4, "ckpt": tmp_path / "two.ckpt"}
    run(module, [1.0] * 4, LayerFreezing(**window), rest, **settings)
    assert rest.requires == [{name for name, _ in module.named_parameters()}] * 2
    for row, other in zip(rest.weights, whole.weights[2:], strict=True):
        assert all(torch.equal(row[name], other[name]) for name in row)


def test_the_whole_run_needs_no_gradient(
    bert_folder: Path, data: TextDataModule, make_trainer: MakeTrainer, seen: Any
) -> None:
    """Nothing is computed for it, nothing stands in the optimizer; afterwards the module trains as before."""
    module, inside = LitMLM(str(bert_folder), learning_rate=1e-2), Snapshots()
    trainer = make_trainer(max_steps=2, callbacks=[LayerFreezing("0:2,embeddings"), seen, inside], limit_val_batches=0)
    trainer.fit(module, data)
    frozen = set(LayerRange("0:2,embeddings").parameters(module))
    assert inside.requires == [set(seen.start) - frozen] * 2
    assert {name for name, gradient in seen.gradients[1].items() if gradient is None} == frozen
    held = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    assert {name for name, p in module.named_parameters() if id(p) not in held} == frozen
    for name in seen.start:
        assert torch.equal(seen.start[name], seen.weights[-1][name]) == (name in frozen), name
    assert all(p.requires_grad for p in module.parameters()), "the next run may train it"


def test_f03_the_module_trains_again_after_a_run_that_failed(run: Run, stack: Any) -> None:
    class Stop(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise RuntimeError("stop")

    module = stack()
    module.head.bias.requires_grad_(False)
    with pytest.raises(RuntimeError, match="stop"):
        run(module, [1.0], LayerFreezing(["0:2", "head"]), Stop())
    assert [n for n, p in module.named_parameters() if not p.requires_grad] == ["head.bias"], "as it was before"


def test_the_backward_pass_ends_at_the_last_frozen_layer(
    bert_folder: Path, data: TextDataModule, make_trainer: MakeTrainer
) -> None:
    reached: list[str] = []

    class Watched(LitMLM):
        def configure_model(self) -> None:
            super().configure_model()
            for number, layer in enumerate(self.backbone.layers):  # type: ignore[union-attr]
                if not layer._backward_hooks:
                    layer.register_full_backward_hook(lambda *_, number=number: reached.append(str(number)))

    trainer = make_trainer(max_steps=1, callbacks=[LayerFreezing("0:2,embeddings")], limit_val_batches=0)
    trainer.fit(Watched(str(bert_folder)), data)
    assert reached == ["2"]


def test_counts_are_logged_over_all_callbacks(run: Run, stack: Any, seen: Any) -> None:
    module = stack()
    module.teacher = nn.Linear(7, 1).requires_grad_(False)
    run(module, [1.0] * 3, LayerFreezing("0:1"), LayerFreezing(["0:2", "embeddings"], steps="1:2"), seen)
    block, table, head, teacher = 20, 20, 25, 8
    total = 3 * block + table + head + teacher
    frozen = [block + teacher, 2 * block + table + teacher, block + teacher]
    assert [row["train/frozen_parameters"] for row in seen.logged] == frozen
    assert [row["train/trainable_parameters"] for row in seen.logged] == [total - count for count in frozen]


def test_several_together(run: Run, stack: Any) -> None:
    """Ranges may overlap; each has its own time."""
    snapshots, module = Snapshots(), stack(adam)
    start = {n: p.detach().clone() for n, p in module.named_parameters()}
    callbacks = [LayerFreezing("0:1"), LayerFreezing("all", steps="1:3"), LayerFreezing(["0:2", "head"], steps="3:4")]
    run(module, [1.0] * 5, *callbacks, snapshots)
    expected = {"blocks.0": [0] * 5, "blocks.1": [1, 0, 0, 0, 1], "blocks.2": [1, 0, 0, 1, 1],
                "embed": [1] * 5, "head": [1, 1, 1, 0, 1]}  # fmt: skip
    for name in start:
        wanted = next(moved for prefix, moved in expected.items() if name.startswith(prefix))
        assert snapshots.moved(name, start[name]) == [bool(move) for move in wanted], name


@pytest.mark.parametrize(
    ("layers", "message", "decoder_moves"),
    [
        ("embeddings", "is backbone.model.bert.embeddings.word_embeddings.weight (tied): frozen with it", 0),
        ("head", "(tied): it trains, since only the rest of the head is frozen; name embeddings to freeze it", 1),
        ("0:2", None, 1),
    ],
)  # fmt: skip
def test_f08_the_tie_is_named(
    bert_folder: Path, data: TextDataModule, make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, seen: Any,
    layers: str, message: str | None, decoder_moves: bool,
) -> None:  # fmt: skip
    module = LitMLM(str(bert_folder), learning_rate=1e-2)
    with caplog.at_level(logging.INFO):
        make_trainer(max_steps=1, callbacks=[LayerFreezing(layers), seen], limit_val_batches=0).fit(module, data)
    tied = "backbone.model.bert.embeddings.word_embeddings.weight"
    assert torch.equal(seen.start[tied], seen.weights[0][tied]) != decoder_moves
    decoder = [line for line in caplog.messages if "cls.predictions.decoder.weight" in line]
    assert len(decoder) == (message is not None)
    assert message is None or message in decoder[0]
    count = sum(p.numel() for p in LayerRange(layers).parameters(module).values())
    assert seen.logged[0]["train/frozen_parameters"] == count, "each once"
    assert f"({count:,} of {sum(p.numel() for p in module.parameters()):,} parameters)" in caplog.text


class Late(LightningModule):
    """Builds its blocks in ``setup`` or in ``configure_model``; a head is there from the beginning."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.head = nn.Linear(2, 2)
        self.blocks: Any = None

    def build(self, where: str) -> None:
        if self.where == where and self.blocks is None:
            self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    def setup(self, stage: str) -> None:
        self.build("setup")

    def configure_model(self) -> None:
        self.build("configure_model")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = batch[:, None].expand(-1, 2)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return adam(self.parameters())


@pytest.mark.parametrize("where", ["setup", "configure_model"])
@pytest.mark.parametrize("steps", [None, "1:3"])
def test_modules_that_build_late(run: Run, where: str, steps: str | None) -> None:
    snapshots = Snapshots()
    run(Late(where), [1.0] * 4, LayerFreezing("0:2", steps=steps), snapshots)
    for name in snapshots.weights[0]:
        frozen = [False] * 3 if steps is None else [False, False, True]
        assert snapshots.moved(name) == (frozen if name.startswith(("blocks.0", "blocks.1")) else [True] * 3), name
    # What was computed for nothing shows where the gradient had to be dropped.
    assert all(("blocks.0.weight" in row) == (steps is not None or where == "setup") for row in snapshots.requires)


def test_a_range_that_late_layers_lack(run: Run) -> None:
    with pytest.raises(ValueError, match="must lie within the model's 3 layers"):
        run(Late("setup"), [1.0], LayerFreezing("0:5"))


@pytest.mark.parametrize(
    ("layers", "phases", "message"),
    [
        ("7:9", None, r"must lie within the model's 3 layers \(0:3\), got '7:9'"),
        ("1:1", None, "match at least one of the model's 3 layers, got '1:1'"),
        ("0:1", ["warmup"], r"name phases of the schedule \(a\), got 'warmup'"),
        (["all", "embeddings", "head"], None, r"must leave something to train, got \['all', 'embeddings', 'head'\]"),
    ],
)
def test_ranges_and_phases_that_do_not_exist(
    bert_folder: Path, data: TextDataModule, make_trainer: MakeTrainer, layers: Any, phases: Any, message: str
) -> None:
    callbacks = [ObjectiveSchedule([Phase("a", "mlm", steps=2)]), LayerFreezing(layers, phases)]
    with pytest.raises(ValueError, match=message):
        make_trainer(callbacks=callbacks).fit(LitMLM(str(bert_folder)), data)


def test_phases_need_a_schedule(run: Run, stack: Any) -> None:
    with pytest.raises(ValueError, match=r"must name phases of the schedule \(\), got 'decay'"):
        run(stack(), [1.0], LayerFreezing("0:1", phases=["decay"]))


@pytest.mark.parametrize(
    "callbacks",
    [
        [LayerFreezing(windows=[FreezeWindow("all"), FreezeWindow(["embeddings", "head"])])],
        [LayerFreezing(windows=[FreezeWindow("all"), FreezeWindow(["embeddings", "head"], steps="1:2")])],
        [LayerFreezing("all"), LayerFreezing(["embeddings", "head"])],
    ],
)
def test_together_they_must_leave_something(run: Run, stack: Any, callbacks: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"LayerFreezing.layers must leave something to train"):
        run(stack(), [1.0], *callbacks)


def test_what_is_frozen_already_may_be_frozen_again(run: Run, stack: Any, seen: Any) -> None:
    """Only what trains counts: here more is frozen already than is left."""
    run(stack(blocks=6), [1.0, 1.0], LayerFreezing("0:5"), LayerFreezing("0:6", steps=":1"), seen)
    moved = {n for n in seen.start if not torch.equal(seen.start[n], seen.weights[0][n])}
    assert moved == {"embed.weight", "head.weight", "head.bias"}


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({}, ValueError, "exactly one of layers and windows"),
        ({"layers": "0:1", "windows": WINDOWS}, ValueError, "exactly one of layers and windows"),
        ({"windows": []}, ValueError, "must be at least one, got none"),
        ({"windows": WINDOWS, "steps": ":3"}, ValueError, "have phases and steps of their own"),
        ({"layers": "0:1", "phases": ["a"], "steps": ":3"}, ValueError, "exclude each other"),
        ({"layers": "first"}, ValueError, "must be like '0:8'"),
        ({"layers": 568}, TypeError, "must be text in quotes"),
        ({"layers": "0:1", "steps": 6000}, TypeError, "must be text in quotes"),
        ({"layers": "0:1", "steps": "3"}, ValueError, "must be like '100:200' or ':500', got '3'"),
        ({"layers": "0:1", "steps": "-3:"}, ValueError, "must be like '100:200'"),
        ({"layers": "0:1", "steps": "3:3"}, ValueError, "must hold at least one step, got '3:3'"),
    ],
)
def test_values_that_cannot_be(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LayerFreezing(**settings)


def test_open_ends() -> None:
    assert parse_steps(":") == (0, float("inf"))
    assert parse_steps("7:") == (7, float("inf"))
