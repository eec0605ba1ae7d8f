"""NumericsGuard: what is not finite never gets into weights or moments, and the report names where it came from."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lit_encoders import LitMLM, TextDataModule
from lit_encoders.callbacks import L2SP, LayerFreezing, NumericsGuard, numerics_guard
from lit_encoders.callbacks.numerics_guard import FILE, can_skip, gradient_norms
from lit_encoders.cli import main
from lit_encoders.modules.token_mean import Loss
from lit_encoders.resume.stops import RunStoppedError

# What they start together takes long: on one worker, once.
pytestmark = pytest.mark.xdist_group("numerics_guard")

SCRIPT = Path(__file__).with_name("nonfinite_ranks.py")
NAN, INF = math.nan, math.inf
State = dict[str, Tensor]
Run = Callable[..., Trainer]


def plain(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, fused=True)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.fixture(params=["plain", "fused", "deferred", "sgd"])
def optimizer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Read at once, and (deferred) as on a GPU: the kernel skips, and the flag is read later."""
    if request.param == "deferred":
        monkeypatch.setattr(numerics_guard, "DEFERRED", ("cpu",))
    return {"plain": plain, "sgd": sgd}.get(request.param, fused)


@pytest.fixture
def deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics_guard, "DEFERRED", ("cpu",))


def state_of(trainer: Trainer, module: LightningModule) -> State:
    """Weights, moments and step counts."""
    found = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    for name, parameter in module.named_parameters():
        for key, value in trainer.optimizers[0].state.get(parameter, {}).items():
            found[f"{name}/{key}"] = value.clone()
    return found


def assert_same(ours: State, theirs: State) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


class Steps(Callback):
    """The state before each optimizer step, and what a step is made of where a test spoils it."""

    def __init__(self, step: int = -1, spoil: Callable[[LightningModule], None] | None = None) -> None:
        self.step, self.spoil = step, spoil
        self.before: dict[int, State] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.before.setdefault(trainer.global_step + 1, state_of(trainer, pl_module))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if trainer.global_step + 1 == self.step and self.spoil is not None:
            self.spoil(pl_module)


def stopped(run: Run, module: Any, values: list[float], *callbacks: Callback, **settings: Any) -> str:
    """Fit until the guard stops it, and give the message; weights and moments must be as before the step."""
    steps = next((callback for callback in callbacks if isinstance(callback, Steps)), None) or Steps()
    # The guard is listed first: it has to see what the others add.
    given = [NumericsGuard(), *(callback for callback in callbacks if callback is not steps), steps]
    with pytest.raises(RunStoppedError) as caught:
        run(module, values, *given, **settings)
    trainer = module.trainer
    record = json.loads((Path(trainer.default_root_dir) / FILE).read_text())
    after, before = state_of(trainer, module), steps.before[record["step"]]
    new = {name for name in after if name not in before}
    # A parameter whose first step was skipped has the state from before a first step.
    assert not any(after[name].any() for name in new)
    assert_same({name: value for name, value in after.items() if name not in new}, before)
    assert not hasattr(trainer.optimizers[0], "found_inf")
    assert caught.value.exit_code == 1
    message = str(caught.value)
    assert "\n" not in message
    assert f"before step {record['step']}" in message
    assert str(Path(trainer.default_root_dir) / FILE) in message
    return message


def record_of(module: LightningModule) -> dict[str, Any]:
    return json.loads((Path(module.trainer.default_root_dir) / FILE).read_text())  # type: ignore[no-any-return]


def spoil(name: str, value: float, index: int = 0) -> Callable[[LightningModule], None]:
    def plant(module: LightningModule) -> None:
        gradient = module.get_parameter(name).grad
        assert gradient is not None
        gradient.view(-1)[index] = value

    return plant


# ---- what is seen ------------------------------------------------------------------------------------------------


def test_norms_of_mixed_gradients() -> None:
    draw = torch.Generator().manual_seed(0)
    gradients = [
        torch.randn(3, 4, generator=draw),
        torch.randn(5, generator=draw, dtype=torch.float64),
        torch.full((4,), 6e4, dtype=torch.float16),  # The norm is beyond half precision.
        torch.randn(7, generator=draw).bfloat16(),
        torch.empty(0, 4),
        torch.tensor([[1.0, NAN], [0.0, 0.0]]),
        torch.tensor(-INF),
        torch.sparse_coo_tensor([[1, 1]], [[3.0], [4.0]], (5, 1)),
    ]
    wanted = [float(g.to_dense().double().square().sum().sqrt()) for g in gradients[:-1]]
    norms = gradient_norms(gradients)
    assert norms.dtype == torch.float32
    assert norms[:-1].tolist() == pytest.approx(wanted, rel=1e-6, nan_ok=True)
    assert norms[-1] == 5.0
    assert gradient_norms([]).shape == (0,)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_loss(value: float, stack: Any, run: Run, optimizer: Any) -> None:
    """Step 3 of four."""
    message = stopped(run, stack(optimizer), [1.0, 2.0, value, 1.0])
    assert f"stopped before step 3: loss {value if not math.isinf(value) else ''}" in message
    assert "in micro-batch 1;" in message
    assert "document" not in message
    assert "rank" not in message


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("value", [NAN, INF, 1e20])
def test_one_gradient(value: float, clip: float | None, stack: Any, run: Run, optimizer: Any) -> None:
    """Named before clipping makes all of them NaN; 1e20 is finite, but its square, Adam's second moment, is not."""
    module = stack(optimizer)
    name = "blocks.1.weight"
    message = stopped(run, module, [1.0, 2.0, 1.0], Steps(2, spoil(name, value, 5)), gradient_clip_val=clip)
    assert f"stopped before step 2: gradient norm not finite in {name} ({'inf' if value == 1e20 else value})" in message
    record = record_of(module)
    assert list(record["gradients"]) == [name]
    assert record["micro_batches"] == [{"rank": 0, "micro_batch": 1, "loss": record["micro_batches"][0]["loss"]}]
    assert isinstance(record["micro_batches"][0]["loss"], float)


def test_an_infinite_loss_that_spoils_no_gradient(stack: Any, run: Run, optimizer: Any) -> None:
    class Added(stack):  # type: ignore[misc]
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) + (INF if batch_idx == 1 else 0.0)  # type: ignore[no-any-return]

    module = Added(optimizer)
    assert "step 2: loss inf in micro-batch 1" in stopped(run, module, [1.0, 1.0, 1.0])
    assert record_of(module)["gradients"] == {}


def test_first_parameters_by_name(stack: Any, run: Run) -> None:
    module = stack(plain)

    def all_of_them(module: LightningModule) -> None:
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.grad.fill_(NAN)

    message = stopped(run, module, [1.0, 1.0], Steps(2, all_of_them))
    names = [name for name, _ in module.named_parameters()]
    assert f"in {', '.join(f'{name} (nan)' for name in names[:6])} and {len(names) - 6} more;" in message
    assert list(record_of(module)["gradients"]) == names


def test_what_another_callback_adds(stack: Any, run: Run, optimizer: Any) -> None:
    """An anchor that is not finite, though the guard is listed before L2SP."""
    l2sp = L2SP(0.1)

    class Broken(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 1:
                l2sp.anchors["blocks.2.bias"][1] = NAN

    message = stopped(run, stack(optimizer), [1.0, 1.0, 1.0], l2sp, Broken())
    assert "before step 2: gradient norm not finite in blocks.2.bias (nan)" in message


def test_frozen_parameters(stack: Any, run: Run, optimizer: Any) -> None:
    """Gradients that LayerFreezing drops do no harm; those left do."""
    frozen = [LayerFreezing("0:1", steps=":2"), Steps(2, None)]
    module = stack(optimizer)
    module.embed.weight.requires_grad = False
    assert "step 3: loss nan" in stopped(run, module, [1.0, 1.0, NAN], *frozen)
    assert "embed.weight" not in record_of(module)["gradients"]

    class Spoil(Callback):
        def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
            spoil("blocks.0.weight", NAN)(pl_module)

    run(stack(optimizer), [1.0, 1.0], NumericsGuard(), Spoil(), LayerFreezing("0:1", steps=":9"), max_steps=2)


def test_accumulated_and_ended_early(stack: Any, run: Run, optimizer: Any) -> None:
    """The last window of an epoch is a short one; losses come back as the module returned them."""
    module = stack(optimizer)
    message = stopped(run, module, [1.0, 2.0, 1.0, 2.0, NAN], accumulate_grad_batches=2)
    assert "step 3: loss nan in micro-batch 1;" in message
    module = stack(optimizer)
    message = stopped(run, module, [1.0, 2.0, 0.0, NAN, 1.0], accumulate_grad_batches=2)
    assert "step 2: loss nan in micro-batch 2;" in message
    assert [one["loss"] for one in record_of(module)["micro_batches"]] == [0.0, "nan"]


def test_a_step_without_gradients(run: Run, stack: Any, optimizer: Any) -> None:
    class Idle(stack):  # type: ignore[misc]
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    run(Idle(optimizer), [1.0, 1.0, 1.0], NumericsGuard())


def test_manual_optimization(make_trainer: Any, run: Run, deferred: None) -> None:
    """Two optimizers in one batch: each is asked about its own parameters."""

    class Manual(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.first, self.second = nn.Linear(2, 1), nn.Linear(2, 1)

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            for part, optimizer in zip((self.first, self.second), self.optimizers(), strict=True):  # type: ignore[arg-type]
                optimizer.zero_grad()
                scale = batch if part is self.second else torch.ones_like(batch)
                self.manual_backward((scale * part(torch.ones(2))).sum())
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [fused(self.first.parameters()), fused(self.second.parameters())]

    module = Manual()
    with pytest.raises(RunStoppedError, match=r"before step 4: loss nan in micro-batch 1;"):
        run(module, [1.0, NAN, 1.0], NumericsGuard())
    assert list(record_of(module)["gradients"]) == ["second.weight", "second.bias"]
    assert all(parameter.isfinite().all() for parameter in module.parameters())


# ---- documents ---------------------------------------------------------------------------------------------------


class Planted(LitMLM):
    """A loss of NaN in chosen batches."""

    planted: tuple[int, ...] = ()

    def training_loss(self, batch: Any) -> Loss:
        self.seen.append(batch)
        loss = super().training_loss(batch)
        return replace(loss, total=loss.total * NAN) if len(self.seen) - 1 in self.planted else loss

    def on_train_start(self) -> None:
        super().on_train_start()
        self.seen: list[Any] = []


@pytest.mark.parametrize("late", [False, True])
def test_documents_of_an_encoder(
    late: bool, bert_folder: Path, text_file: Path, make_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accumulation 2: the sixth micro-batch is the second one of step 3."""
    monkeypatch.setattr(numerics_guard, "DEFERRED", ("cpu",) if late else ())
    module = Planted(str(bert_folder), learning_rate=1e-3)
    module.planted = (5,)
    data = TextDataModule(str(text_file), sequence_length=48, slots=96, val_share=0.2)
    trainer = make_trainer(
        accumulate_grad_batches=2, max_steps=5, callbacks=[NumericsGuard(), steps := Steps()], limit_val_batches=0
    )
    with pytest.raises(RunStoppedError) as caught:
        trainer.fit(module, data)
    assert_same(state_of(trainer, module), steps.before[3])
    batches = module.seen[4:6]
    record = record_of(module)
    assert record["step"] == 3
    assert record["phase"] is None
    assert record["training_text"] == [str(text_file)]
    for number, (one, batch) in enumerate(zip(record["micro_batches"], batches, strict=True), 1):
        assert (one["rank"], one["micro_batch"]) == (0, number)
        assert one["documents"] == batch.documents.tolist()
        assert (one["epoch"], one["window"], one["pack"]) == tuple(batch.here)
    # The sum over targets, in nats: between 1 and 10 for each.
    assert 1 < record["micro_batches"][0]["loss"] / 10 < 40
    assert record["micro_batches"][1]["loss"] == "nan"
    documents = list(dict.fromkeys(batches[1].documents.tolist()))
    shown = ", ".join(map(str, documents[:6])) + (f" and {len(documents) - 6} more" if len(documents) > 6 else "")
    assert f"loss nan in micro-batch 2, with documents {shown} of the training text;" in str(caught.value)


# ---- a flag that is read later -----------------------------------------------------------------------------------


class Reads(TorchDispatchMode):
    """Counts how often a number goes from the device to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        return func(*args, **(kwargs or {}))


def test_reads_one_number_a_step_and_a_step_late(
    stack: Any, run: Run, optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = numerics_guard.DEFERRED == ("cpu",) and optimizer is fused
    counts: list[int] = []

    class Counted(NumericsGuard):
        def on_before_optimizer_step(self, *arguments: Any) -> None:
            with Reads() as reads:
                super().on_before_optimizer_step(*arguments)
            counts.append(reads.count)

    run(stack(optimizer), [1.0, 2.0, 1.0, 2.0], Counted())
    assert counts == ([0, 1, 1, 1] if late else [1, 1, 1, 1])


def test_read_before_others_look(stack: Any, make_trainer: Any, deferred: None) -> None:
    """Step 2 is the one before a validation, a checkpoint, the end."""

    class Validated(stack):  # type: ignore[misc]
        validated = 0

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.validated += 1

        def val_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.ones(1))  # type: ignore[arg-type]

    values = torch.utils.data.DataLoader(torch.tensor([1.0, NAN, 1.0, 1.0]), batch_size=1)  # type: ignore[arg-type]
    module = Validated(fused)
    with pytest.raises(RunStoppedError, match="before step 2"):
        make_trainer(val_check_interval=2, callbacks=[NumericsGuard()], max_steps=4).fit(module, values)
    assert module.validated == 0

    class Saves(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(Path(trainer.default_root_dir) / "two.ckpt")

    module = Validated(fused)
    trainer = make_trainer(callbacks=[Saves(), NumericsGuard()], max_steps=4, limit_val_batches=0)
    with pytest.raises(RunStoppedError, match="before step 2"):
        trainer.fit(module, values)
    assert not (Path(trainer.default_root_dir) / "two.ckpt").exists()

    trainer = make_trainer(callbacks=[NumericsGuard()], max_steps=2, limit_val_batches=0)
    with pytest.raises(RunStoppedError, match="before step 2"):
        trainer.fit(Validated(fused), values)


def test_which_optimizers_skip() -> None:
    def made(kind: Any, **settings: Any) -> torch.optim.Optimizer:
        return kind([nn.Parameter(torch.ones(2))], lr=0.1, **settings)  # type: ignore[no-any-return]

    assert can_skip(made(torch.optim.AdamW, fused=True))
    assert can_skip(made(torch.optim.Adam, fused=True))
    assert not can_skip(made(torch.optim.AdamW))
    assert not can_skip(made(torch.optim.SGD, fused=True, momentum=0.9))

    class Own(torch.optim.AdamW):
        pass

    assert not can_skip(made(Own, fused=True))
    hooked = made(torch.optim.AdamW, fused=True)
    hooked.register_step_post_hook(lambda *_: None)
    assert not can_skip(hooked)


def test_decoupled_anchors_do_not_move_either(stack: Any, run: Run, optimizer: Any) -> None:
    assert "before step 3" in stopped(run, stack(optimizer), [1.0, 1.0, NAN, 1.0], L2SP(0.1, mode="decoupled"))


# ---- what it leaves alone ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_healthy_run_is_bit_equal(accumulate: int, stack: Any, run: Run, optimizer: Any) -> None:
    values = [1.0, -2.0, 0.5, 0.0, 3.0]
    settings = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5}
    without, guarded = stack(optimizer), stack(optimizer)
    ours = state_of(run(guarded, values, NumericsGuard(), **settings), guarded)
    theirs = state_of(run(without, values, **settings), without)
    assert_same(ours, theirs)
    assert not (Path(guarded.trainer.default_root_dir) / FILE).exists()
    assert not hasattr(guarded.trainer.optimizers[0], "found_inf")


def test_a_gradient_scaler_goes_on(stack: Any, run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """16-mixed: the scaler skips the step and halves its scale."""
    module = stack(plain)
    steps = Steps()
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        trainer = run(module, [1.0, INF, 1.0], NumericsGuard(), steps, plugins=[MixedPrecision("16-mixed", "cpu")])
    scaler = trainer.precision_plugin.scaler
    assert scaler.get_scale() == 2.0**15
    assert_same(steps.before[3], steps.before[2])
    assert all(torch.isfinite(value).all() for value in state_of(trainer, module).values())
    assert "NumericsGuard does nothing" in caplog.text
    assert not (Path(trainer.default_root_dir) / FILE).exists()


def test_stands_last_but_for_checkpoints(stack: Any, run: Run, tmp_path: Path) -> None:
    guard, steps, resume = NumericsGuard(), Steps(), LayerFreezing("0:1")
    trainer = run(stack(plain), [1.0], guard, steps, resume)
    assert trainer.callbacks[-1] is guard  # type: ignore[attr-defined]

    from lightning.pytorch.callbacks import ModelCheckpoint

    saving = ModelCheckpoint(tmp_path / "c")
    trainer = run(stack(plain), [1.0], saving, guard, steps, enable_checkpointing=True)
    assert trainer.callbacks[-2:] == [guard, saving]  # type: ignore[attr-defined]


def test_an_old_report_goes_and_a_full_disk_is_said(stack: Any, run: Run, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("{}")
    run(stack(plain), [1.0], NumericsGuard())
    assert not (tmp_path / FILE).exists()
    (tmp_path / f".{FILE}").mkdir()  # Nothing can be written there.
    with pytest.raises(RunStoppedError, match=r"loss nan in micro-batch 1; '.*nonfinite.json' cannot be written \("):
        run(stack(plain), [NAN], NumericsGuard())


def test_a_strategy_that_keeps_its_gradients(stack: Any, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SingleDeviceStrategy, "handles_gradient_accumulation", True)
    with pytest.raises(NotImplementedError, match="NumericsGuard cannot look into the gradients of SingleDevice"):
        run(stack(plain), [1.0], NumericsGuard())


# ---- two processes -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(bert_folder: Path, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    root = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(SCRIPT), str(bert_folder), str(text_file), str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return root, [torch.load(root / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("case", ["nan", "inf", "gradient", "deferred"])
def test_one_rank_of_two(ranks: tuple[Path, list[Any]], strategy: str, case: str) -> None:
    root, found = ranks
    first, second = (rank[f"{strategy}/{case}"] for rank in found)
    path = root / strategy / case / FILE
    record = json.loads(path.read_text())
    assert first["message"] == second["message"]
    assert record["step"] == 2
    for one in (first, second):
        # As before step 2; where the flag is read later, the third one's batches have been read by then.
        assert one["steps"] == (3 if case == "deferred" else 2)
        assert_same(one["after"], one["before"])
        assert any("exp_avg" in name for name in one["after"])
        assert all(value.isfinite().all() for value in one["after"].values())
        assert not one["found_inf"]
    documents = [rank[f"{strategy}/{case}"]["documents"][2:4] for rank in found]
    listed = {(one["rank"], one["micro_batch"]): one["documents"] for one in record["micro_batches"]}
    assert listed == {(rank, 1 + number): documents[rank][number] for rank in (0, 1) for number in (0, 1)}
    packs = [(one["epoch"], one["window"], one["pack"]) for one in record["micro_batches"]]
    assert sorted(packs) == [(0, 0, pack) for pack in (4, 5, 6, 7)]
    wrong = [(one["rank"], one["micro_batch"]) for one in record["micro_batches"] if isinstance(one["loss"], str)]
    if case == "gradient":
        assert wrong == []
        name = "backbone.model.bert.encoder.layer.1.output.dense.weight"
        assert list(record["gradients"]) == [name]
        assert f"gradient norm not finite in {name} (nan)" in first["message"]
    else:
        assert wrong == [(1, 2)]
        shown = ", ".join(map(str, list(dict.fromkeys(documents[1][1]))[:3]))
        value = "inf" if case == "inf" else "nan"
        assert f"step 2: loss {value} in micro-batch 2 on rank 1, with documents {shown}" in first["message"]
        assert bool(record["gradients"]) == (case != "inf")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_healthy_ranks_are_bit_equal(ranks: tuple[Path, list[Any]], strategy: str) -> None:
    for rank in ranks[1]:
        without = rank[f"{strategy}/healthy-without"]
        for case in ("healthy", "deferred-healthy"):
            assert rank[f"{strategy}/{case}"]["message"] is None
            assert_same(rank[f"{strategy}/{case}"]["after"], without["after"])


# ---- the command -------------------------------------------------------------------------------------------------


def test_a_rate_beyond_reason(
    bert_folder: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """One line and exit code 1; what was kept before is finite; there is no result."""
    settings = {
        "model": {
            "class_path": "lit_encoders.LitMLM",
            "init_args": {"backbone": str(bert_folder), "learning_rate": 1e30},
        },
        "data": {"train": str(text_file), "val_share": 0.2, "sequence_length": 48, "slots": 96},
        "schedule": {
            "class_path": "lit_encoders.callbacks.CLMDetour",
            "init_args": {"steps": 4, "decay_share": 0.5, "head_warmup_steps": 1},
        },
        "trainer": {"accelerator": "cpu", "precision": "32-true", "log_every_n_steps": 1},
    }
    config = tmp_path / "wild.yaml"
    config.write_text(yaml.safe_dump(settings))
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    code = main(["fit", "--config", str(config)])
    said = capsys.readouterr().err.splitlines()
    assert code == 1
    assert said[-1].startswith("lit-encoders: stopped before step 2 (phase 'detour'): loss nan in micro-batch 1, with ")
    assert said[-1].endswith("; 'runs/wild/nonfinite.json' has the whole list")
    assert not any("Traceback" in line for line in said)
    root = tmp_path / "runs" / "wild"
    assert (root / FILE).is_file()
    assert not (root / "export").exists()
    assert not (root / "summary.json").exists()
    kept = sorted(root.glob("checkpoints/*.ckpt"))
    assert [path.name for path in kept] == ["head_warmup.ckpt"]
    saved = torch.load(kept[0], weights_only=True)
    assert all(value.isfinite().all() for value in saved["state_dict"].values())
    moments = [v for one in saved["optimizer_states"][0]["state"].values() for v in one.values()]
    assert moments
    assert all(torch.as_tensor(value).isfinite().all() for value in moments)
