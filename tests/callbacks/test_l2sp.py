"""L2SP: the penalty by its formula, once per optimizer step, toward where the run began and nowhere else."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from safetensors import safe_open
from torch import Tensor, nn

from lit_encoders import LitMLM, TextDataModule
from lit_encoders.callbacks import L2SP, HFExport, LayerFreezing, WeightDrift
from lit_encoders.callbacks.l2sp import add_l2sp_grad_, pull_, squared_distances
from lit_encoders.modules.token_mean import Loss, TokenMeanModule
from lit_encoders.weights.anchor import copies

MakeTrainer = Callable[..., Trainer]
Run = Callable[..., Trainer]
FORMS = [("sum", 2.0), ("half", 1.0)]


@pytest.fixture
def data(text_file: Path) -> TextDataModule:
    return TextDataModule(str(text_file), sequence_length=48, slots=96, val_share=0.1)


def penalty(weights: dict[str, Tensor], start: dict[str, Tensor], strength: float = 1.0) -> float:
    """The form "sum", in float64, element by element."""
    squares = [
        (float(w) - float(w0)) ** 2
        for name in start
        for w, w0 in zip(weights[name].flatten().tolist(), start[name].flatten().tolist(), strict=True)
    ]
    return strength * math.fsum(squares)


def only(value: float) -> type[LightningModule]:
    """A module of three weights of one value, whose gradient is a batch's value."""

    class Three(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 1, bias=False)])
            nn.init.constant_(self.layers[0].weight, value)  # type: ignore[arg-type]

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return (batch.mean() * self.layers[0].weight).sum()  # type: ignore[operator]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    return Three


@pytest.mark.parametrize(("form", "doubling"), FORMS)
@pytest.mark.parametrize(
    ("accumulate", "values"), [(1, [-0.2, 0.0, 0.0]), (4, [-0.2] * 4 + [0.0] * 4), (4, [-0.2] * 4 + [0.0] * 2)]
)
def test_s01_s04_penalty_and_gradient(
    run: Run, seen: Any, form: Any, doubling: float, accumulate: int, values: list[float]
) -> None:
    """From 1 to 1.2 in the first step; then the data say nothing: also in a last window of 2 of 4."""
    run(only(1.0)(), values, L2SP(0.5, form), seen, accumulate_grad_batches=accumulate)
    name = "layers.0.weight"
    torch.testing.assert_close(seen.weights[0][name], torch.full((1, 3), 1.2))
    assert seen.logged[0]["l2sp/penalty"] == 0
    torch.testing.assert_close(seen.gradients[0][name], torch.full((1, 3), -0.2))
    assert seen.logged[1]["l2sp/penalty"] == pytest.approx(0.03 * doubling, abs=1e-7)
    assert seen.logged[1]["l2sp/rest/drift"] == pytest.approx(0.2, abs=1e-6)
    torch.testing.assert_close(seen.gradients[1][name], torch.full((1, 3), 0.1 * doubling))


@pytest.mark.parametrize("tokens", [1, 7, 5000])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_s04_token_counts_do_not_count(run: Run, seen: Any, tokens: int, accumulate: int) -> None:
    """A loss that is a sum over tokens, divided once for all: the penalty is not part of what is divided."""

    class Sums(TokenMeanModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 1, bias=False)])
            nn.init.constant_(self.layers[0].weight, 1.0)  # type: ignore[arg-type]

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            total = (batch.mean() * self.layers[0].weight).sum() * tokens  # type: ignore[operator]
            return self.step_loss(Loss(total, tokens), tokens)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    run(Sums(), [-0.2] * accumulate + [0.0] * accumulate, L2SP(0.5), seen, accumulate_grad_batches=accumulate)
    torch.testing.assert_close(seen.gradients[1]["layers.0.weight"], torch.full((1, 3), 0.2))


@pytest.mark.parametrize(("form", "doubling"), FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradient_is_the_penaltys_by_autograd(form: str, doubling: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shapes, strength = (
        {"a": (3, 4), "b": (5,), "c": (2, 3, 2), "scalar": ()},
        {"a": 0.3, "b": 0.0, "c": 2.0, "scalar": 1.0},
    )
    weights = {n: nn.Parameter(torch.randn(s, dtype=torch.float64).to(dtype)) for n, s in shapes.items()}
    start = {n: torch.randn(s, dtype=torch.float64).to(dtype) for n, s in shapes.items()}
    exact = {n: w.detach().double().requires_grad_() for n, w in weights.items()}
    total = sum(doubling / 2 * strength[n] * (exact[n] - start[n].double()).square().sum() for n in shapes)
    wanted = torch.autograd.grad(total, list(exact.values()), allow_unused=True)  # type: ignore[arg-type]
    for weight in weights.values():
        weight.grad = torch.ones_like(weight)
    weights["untouched"], start["untouched"] = nn.Parameter(torch.ones(2)), torch.zeros(2)
    slopes = {n: doubling * s for n, s in strength.items()} | {"untouched": 1.0}
    add_l2sp_grad_(weights, start, slopes)
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14}[dtype]
    for name, gradient in zip(shapes, wanted, strict=True):
        torch.testing.assert_close(weights[name].grad.double(), 1 + gradient, rtol=tolerance, atol=tolerance)
    assert weights["untouched"].grad is None, "what has no gradient (frozen, or not used) stays so"
    del weights["untouched"]
    sums = squared_distances(weights, start)[:, 0]
    found = sum(doubling / 2 * strength[n] * s for n, s in zip(shapes, sums.tolist(), strict=True))
    assert found == pytest.approx(float(total), rel=tolerance)


@pytest.mark.parametrize("mode", ["gradient", "decoupled"])
@pytest.mark.parametrize(("form", "doubling"), FORMS)
def test_both_modes_against_a_plain_loop(
    run: Run, stack: Any, seen: Any, mode: Any, form: Any, doubling: float
) -> None:
    """AdamW with decay and a rate that changes; the decoupled pull comes after the step, with that step's rate."""
    rates, values = [0.1, 0.05, 0.02, 0.02], [1.0, -0.5, 2.0, 0.3]

    def adam(parameters: Any) -> Any:
        optimizer = torch.optim.AdamW(parameters, lr=1.0, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rates[min(step, 3)])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    class Scheduled(stack):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return adam(self.parameters())

    strength = {"0:1,head": 0.7, "1:2": 0.0, "rest": 0.2}
    module = Scheduled()
    run(module, values, L2SP(strength, form, mode), seen)
    plain = {n: nn.Parameter(w.double()) for n, w in seen.start.items()}
    optimizer = torch.optim.AdamW(plain.values(), lr=1.0, weight_decay=0.1)

    def slope(name: str) -> float:
        text = "0:1,head" if name.startswith(("blocks.0", "head")) else "1:2" if name.startswith("blocks.1") else "rest"
        return doubling * strength[text]

    for rate, value in zip(rates, values, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        for name, weight in plain.items():
            weight.grad = value * module.direction(name).double()
            if mode == "gradient":
                weight.grad += slope(name) * (weight.detach() - seen.start[name].double())
        optimizer.step()
        for name, weight in plain.items() if mode == "decoupled" else ():
            weight.data -= rate * slope(name) * (weight.data - seen.start[name].double())
    for name, weight in plain.items():
        torch.testing.assert_close(seen.weights[-1][name].double(), weight.data, rtol=1e-5, atol=2e-6, msg=name)


def test_s02_half_of_w_squared_is_the_optimizers_weight_decay(run: Run, stack: Any, seen: Any) -> None:
    """With a start of 0 the form "half" is SGD's ``weight_decay``, momentum and all."""
    module, values = stack(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)), [1.0, -0.5, 2.0]
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    run(module, values, L2SP(0.3, "half"), seen)
    plain = {n: nn.Parameter(torch.zeros_like(w)) for n, w in seen.start.items()}
    optimizer = torch.optim.SGD(plain.values(), lr=0.1, momentum=0.9, weight_decay=0.3)
    for value in values:
        for name, weight in plain.items():
            weight.grad = value * module.direction(name)
        optimizer.step()
    for name, weight in plain.items():
        torch.testing.assert_close(seen.weights[-1][name], weight.data, rtol=0, atol=1e-6)


def test_the_penalty_comes_before_clipping(run: Run, seen: Any) -> None:
    run(only(1.0)(), [-0.2, 0.0], L2SP(50.0), seen, gradient_clip_val=0.05)
    # From the second step on the gradient is the penalty's alone, and the step as long as clipping allows.
    moved = seen.weights[1]["layers.0.weight"] - seen.weights[0]["layers.0.weight"]
    assert float(moved.norm()) == pytest.approx(0.05, rel=1e-4)


def test_bf16_distances_are_taken_in_float32() -> None:
    """One unit in the last place from the start, in many weights: bfloat16 sums would stop growing at 256 terms."""
    start = torch.ones(4096, dtype=torch.bfloat16)
    weight = nn.Parameter(start + 2**-7)
    found = squared_distances({"w": weight}, {"w": start})
    assert found.tolist() == [[4096 * 2**-14, 4096.0]]
    weight.grad = torch.zeros_like(weight)
    add_l2sp_grad_({"w": weight}, {"w": start}, {"w": 3.0})
    assert torch.equal(weight.grad, torch.full_like(weight, 3 * 2**-7))
    # 100 - 0.3 * (100 - 1) is 70.3: in bfloat16 all through, 100 - 29.75 would be 70.
    far = nn.Parameter(torch.full((2,), 100.0, dtype=torch.bfloat16))
    pull_({"w": far}, {"w": start[:2]}, {"w": 0.3})
    assert torch.equal(far.data, torch.full((2,), 70.3).bfloat16())


def test_float64_weights_keep_their_digits() -> None:
    start = torch.ones(2, dtype=torch.float64)
    weight = nn.Parameter(start + 1e-12)
    assert squared_distances({"w": weight}, {"w": start})[0, 0].item() == pytest.approx(2e-24, rel=1e-3)
    pull_({"w": weight}, {"w": start}, {"w": 0.5})
    torch.testing.assert_close(weight.data - 1, torch.full_like(start, 5e-13), rtol=1e-3, atol=0)


def test_bf16_module(bert_folder: Path, data: TextDataModule, make_trainer: MakeTrainer, seen: Any) -> None:
    module = LitMLM(str(bert_folder), learning_rate=1e-2, dtype="bfloat16")
    make_trainer(max_steps=3, callbacks=[L2SP(0.1, base=str(bert_folder)), seen], limit_val_batches=0).fit(module, data)
    assert seen.logged[0]["l2sp/penalty"] == 0, "the base in the weights' own type is where they start"
    wanted = penalty(seen.weights[1], seen.start, 0.1)
    assert seen.logged[2]["l2sp/penalty"] == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("strength", [0.1, {"embeddings": 0.1, "rest": 0.1}])
def test_tied_weights_count_once(
    bert_folder: Path, data: TextDataModule, make_trainer: MakeTrainer, seen: Any, strength: Any
) -> None:
    module = LitMLM(str(bert_folder), learning_rate=1e-2)
    make_trainer(max_steps=3, callbacks=[L2SP(strength), seen], limit_val_batches=0).fit(module, data)
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    assert len(names) > len(seen.start), "the decoder is tied, and listed once"
    assert seen.logged[2]["l2sp/penalty"] == pytest.approx(penalty(seen.weights[1], seen.start, 0.1), rel=1e-5)
    if isinstance(strength, dict):
        parts = [seen.logged[2][f"l2sp/{text}/penalty"] for text in strength]
        assert sum(parts) == pytest.approx(seen.logged[2]["l2sp/penalty"])
        assert min(parts) > 0


def test_validation_loss_has_no_penalty(bert_folder: Path, data: TextDataModule, make_trainer: MakeTrainer) -> None:
    module = LitMLM(str(bert_folder), learning_rate=1e-2)
    trainer = make_trainer(max_steps=2, callbacks=[L2SP(1000.0)], val_check_interval=2)
    trainer.fit(module, data)
    logged = trainer.callback_metrics["val/mlm_loss"].item()
    assert trainer.callback_metrics["l2sp/penalty"] > 1
    (alone,) = make_trainer().validate(module, data, verbose=False)
    assert logged == pytest.approx(alone["val/mlm_loss"], abs=1e-6)


@pytest.mark.parametrize("mode", ["gradient", "decoupled"])
@pytest.mark.parametrize("first", [True, False])
def test_frozen_weights_are_not_pulled(run: Run, stack: Any, seen: Any, mode: Any, first: bool) -> None:
    freezing, l2sp = LayerFreezing("0:2", steps="1:3"), L2SP(0.2, mode=mode)
    callbacks = [freezing, l2sp] if first else [l2sp, freezing]
    run(stack(lambda p: torch.optim.AdamW(p, lr=0.1)), [1.0] * 4, *callbacks, seen)
    for name in seen.start:
        same = [torch.equal(a[name], b[name]) for a, b in zip(seen.weights, seen.weights[1:], strict=False)]
        assert same == ([True, True, False] if name.startswith(("blocks.0", "blocks.1")) else [False] * 3)
    assert seen.logged[2]["l2sp/penalty"] > 0


@pytest.mark.parametrize("first", [True, False])
def test_what_is_frozen_for_the_run_is_not_anchored(run: Run, stack: Any, seen: Any, first: bool) -> None:
    freezing, l2sp = LayerFreezing("0:2"), L2SP({"0:1": 5.0, "rest": 0.2})
    callbacks = [freezing, l2sp] if first else [l2sp, freezing]
    run(stack(), [1.0, 0.0, 0.0], *callbacks, seen)
    assert seen.logged[2]["l2sp/0:1/penalty"] == 0
    assert seen.logged[2]["l2sp/penalty"] == pytest.approx(penalty(seen.weights[1], seen.start, 0.2), rel=1e-5)


# ---- the anchor --------------------------------------------------------------------------------------------------


def test_s09_a_resumed_run_is_pulled_to_where_the_first_began(run: Run, stack: Any, seen: Any, tmp_path: Path) -> None:
    trainer = run(stack(), [1.0, 1.0], L2SP(0.5))
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    start = {name: p.detach() for name, p in stack().named_parameters()}
    saved = torch.load(tmp_path / "two.ckpt", weights_only=True)
    assert set(saved["state_dict"]) == set(stack().state_dict()), "the anchor is not among the weights"
    assert all(isinstance(s, float) for sums in _anchor(saved)["sums"].values() for s in sums)
    again = L2SP(0.5)
    run(stack(), [0.0] * 3, again, seen, ckpt=tmp_path / "two.ckpt", max_steps=3, max_epochs=-1)
    wanted = penalty(saved["state_dict"], start, 0.5)
    assert wanted > 0.1
    assert seen.logged[0]["l2sp/penalty"] == pytest.approx(wanted, rel=1e-6)
    for name, gradient in seen.gradients[0].items():
        torch.testing.assert_close(gradient, saved["state_dict"][name] - start[name])


def _anchor(saved: dict[str, Any]) -> dict[str, Any]:
    (state,) = (state for key, state in saved["callbacks"].items() if key.startswith("L2SP"))
    return state["anchor"]  # type: ignore[no-any-return]


def test_s09_another_start_is_refused(run: Run, stack: Any, tmp_path: Path) -> None:
    run(stack(), [1.0], L2SP(0.5)).save_checkpoint(tmp_path / "one.ckpt")
    with pytest.raises(ValueError, match=r"L2SP.base must be the checkpoint's: .* other weights .* name the folder"):
        run(stack(seed=1), [1.0] * 3, L2SP(0.5), ckpt=tmp_path / "one.ckpt", max_epochs=-1, max_steps=2)
    # The same objects, without a checkpoint: nothing of the failed attempt is left.
    callback, module = L2SP(0.5), stack(seed=1)
    with pytest.raises(ValueError, match="must be the checkpoint's"):
        run(module, [1.0] * 3, callback, ckpt=tmp_path / "one.ckpt", max_epochs=-1, max_steps=2)
    run(module, [1.0], callback)


def test_u11_freezing_may_move_in_the_list_before_a_resume(run: Run, stack: Any, seen: Any, tmp_path: Path) -> None:
    run(stack(), [1.0], LayerFreezing("0:1"), L2SP(0.5)).save_checkpoint(tmp_path / "one.ckpt")
    settings: dict[str, Any] = {"ckpt": tmp_path / "one.ckpt", "max_epochs": -1, "max_steps": 2}
    run(stack(), [1.0] * 3, L2SP(0.5), LayerFreezing("0:1"), seen, **settings)
    assert seen.logged[0]["l2sp/penalty"] > 0

    class Whole(stack):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    # Frozen then, and not now: of its start nothing was written down, which is no reason to refuse it.
    run(Whole(), [1.0], LayerFreezing("0:1"), L2SP(0.5)).save_checkpoint(tmp_path / "one.ckpt")
    run(Whole(), [1.0] * 3, L2SP(0.5), **settings)


@pytest.fixture
def from_folder(
    bert_folder: Path, data: TextDataModule, make_trainer: MakeTrainer, tmp_path: Path
) -> Callable[..., tuple[Trainer, LitMLM]]:
    def fit(steps: int, *callbacks: Any, ckpt: Path | None = None) -> tuple[Trainer, LitMLM]:
        module = LitMLM(str(bert_folder), learning_rate=1e-2)
        trainer = make_trainer(max_steps=steps, callbacks=list(callbacks), limit_val_batches=0)
        trainer.fit(module, data, ckpt_path=ckpt)
        return trainer, module

    return fit


def test_s09_a_base_folder(bert_folder: Path, from_folder: Any, seen: Any, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(bert_folder, base)
    trainer, _ = from_folder(2, L2SP(0.5, base=str(base)), HFExport())
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    saved = torch.load(tmp_path / "two.ckpt", weights_only=True)
    start = {name: p.detach() for name, p in _fresh(bert_folder).named_parameters()}
    assert len(_anchor(saved)["digest"]) >= 32
    with safe_open(tmp_path / "export" / "model.safetensors", "pt") as ours, \
            safe_open(bert_folder / "model.safetensors", "pt") as theirs:  # fmt: skip
        assert set(ours.keys()) == set(theirs.keys()), "the anchor is not among exported weights"
    # The folder may lie elsewhere now.
    base.rename(tmp_path / "moved")
    from_folder(3, L2SP(0.5, base=str(tmp_path / "moved")), seen, ckpt=tmp_path / "two.ckpt")
    wanted = penalty(saved["state_dict"], start, 0.5)
    assert wanted > 1e-3
    assert seen.logged[0]["l2sp/penalty"] == pytest.approx(wanted, rel=1e-5)
    with pytest.raises(ValueError, match=rf"^L2SP.base must be .* got '{base}' \(no such folder\)$"):
        from_folder(3, L2SP(0.5, base=str(base)), ckpt=tmp_path / "two.ckpt")
    # The trained weights themselves are no base.
    with pytest.raises(ValueError, match=r"L2SP.base must be the checkpoint's \(content \w{12}\), got content \w{12}"):
        from_folder(3, L2SP(0.5, base=str(tmp_path / "export")), ckpt=tmp_path / "two.ckpt")


def _fresh(folder: Path) -> LitMLM:
    module = LitMLM(str(folder))
    module.configure_model()
    return module


def test_s09_a_start_is_no_folder(bert_folder: Path, from_folder: Any, tmp_path: Path) -> None:
    trainer, _ = from_folder(1, L2SP(0.5))
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    with pytest.raises(ValueError, match=r"L2SP.base must be the checkpoint's, 'start', got"):
        from_folder(2, L2SP(0.5, base=str(bert_folder)), ckpt=tmp_path / "one.ckpt")


def test_a_base_of_another_shape_or_model(from_folder: Any, tmp_path: Path, tokenizer: Any) -> None:
    from transformers import BertConfig, BertForMaskedLM, BertModel

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 128}
    headless = r"must hold what is anchored, '.*' lacks \d+ tensors"
    for name, kind, settings, message in (
        ("headless", BertModel, {"vocab_size": 95, "num_hidden_layers": 3}, headless),
        ("small", BertForMaskedLM, {"vocab_size": 95, "num_hidden_layers": 2}, "number of layers, got 2 in .* for 3"),
        ("deep", BertForMaskedLM, {"vocab_size": 95, "num_hidden_layers": 4}, "number of layers, got 4 in .* for 3"),
        ("wide", BertForMaskedLM, {"vocab_size": 96, "num_hidden_layers": 3}, "must be of the model's sizes"),
    ):
        kind(BertConfig(**sizes, **settings)).save_pretrained(tmp_path / name)
        with pytest.raises(ValueError, match=message):
            from_folder(1, L2SP(0.5, base=str(tmp_path / name)))


def test_one_copy_serves_all_and_goes_after_the_run(run: Run, stack: Any) -> None:
    module, l2sp, kept = stack(), L2SP(0.5, device="cpu"), {}

    class At(WeightDrift):
        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
            for name in l2sp.parameters:
                kept[name] = l2sp.anchors[name] is self.anchors[name]

    run(module, [1.0, 1.0], l2sp, At(device="cpu"))
    assert set(kept) == {name for name, _ in module.named_parameters()}
    assert all(kept.values())
    assert not l2sp.anchors
    assert not copies(module, "start on cpu")


def test_a_second_fit_begins_where_the_first_ended(run: Run, stack: Any, seen: Any) -> None:
    module, callback = stack(), L2SP(0.5)
    run(module, [1.0, 1.0], callback)
    run(module, [0.0, 0.0], callback, seen)
    assert [row["l2sp/penalty"] for row in seen.logged] == [0.0, 0.0]


class Late(LightningModule):
    """Builds in ``setup`` or ``configure_model``; a head stands there from the beginning, and nothing is drawn."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.head = nn.Linear(2, 2)
        self.blocks: Any = None

    def build(self, where: str) -> None:
        if self.where == where and self.blocks is None:
            self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
            for parameter in self.parameters():
                nn.init.ones_(parameter)

    def setup(self, stage: str) -> None:
        self.build("setup")

    def configure_model(self) -> None:
        self.build("configure_model")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return sum(batch.mean() * p.sum() for p in self.parameters())  # type: ignore[return-value]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("where", ["setup", "configure_model"])
def test_modules_that_build_late(run: Run, seen: Any, tmp_path: Path, where: str) -> None:
    callback = L2SP({"0:1": 0.5, "rest": 0.25})
    run(Late(where), [1.0, 0.0], callback, seen).save_checkpoint(tmp_path / "two.ckpt")
    # Each of the four weights of a matrix, and two of a bias, is 0.1 away from its start.
    assert seen.logged[1]["l2sp/0:1/penalty"] == pytest.approx(0.5 * 6 * 0.01, rel=1e-5)
    assert seen.logged[1]["l2sp/rest/penalty"] == pytest.approx(0.25 * 18 * 0.01, rel=1e-5)
    again, settings = (
        L2SP({"0:1": 0.5, "rest": 0.25}),
        {"ckpt": tmp_path / "two.ckpt", "max_epochs": -1, "max_steps": 3},
    )
    if where == "setup":
        with pytest.raises(ValueError, match=r"L2SP.base must be a folder where a module builds its layers in setup"):
            run(Late(where), [0.0] * 3, again, **settings)
    else:
        run(Late(where), [0.0] * 3, again, seen, **settings)
        assert seen.logged[-1]["l2sp/penalty"] > 0


def test_a_run_leaves_no_hooks_behind(run: Run, stack: Any) -> None:
    class Stop(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise RuntimeError("stop")

    made: list[torch.optim.Optimizer] = []

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(parameters, lr=0.1))
        return made[-1]

    run(stack(sgd), [1.0], L2SP(0.5, mode="decoupled"))
    with pytest.raises(RuntimeError, match="stop"):
        run(stack(sgd), [1.0], L2SP(0.5, mode="decoupled"), Stop())
    assert [len(optimizer._optimizer_step_post_hooks) for optimizer in made] == [0, 0]


# ---- mistakes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strength": -0.1}, r"^L2SP.strength must be at least 0, got -0.1 for 'rest'$"),
        ({"strength": {"0:1": 0.1, "head": -1}}, "must be at least 0, got -1 for 'head'"),
        ({"strength": float("nan")}, "must be at least 0, got nan"),
        ({"strength": {}}, "must name at least one range, got none"),
        ({"strength": {"0:1, head": 0.1, "first": 1}}, "must be like '0:8'"),
        ({"strength": 0.1, "form": "double"}, "L2SP.form must be one of sum, half, got 'double'"),
        ({"strength": 0.1, "mode": "loss"}, "L2SP.mode must be one of gradient, decoupled, got 'loss'"),
    ],
)
def test_values_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        L2SP(**settings)


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ([{"strength": {"0:2": 0.1, "1:3": 0.1}}], r"must not name a weight twice, got '0:2' and '1:3'"),
        ([{"strength": {"0:1,head": 0.1, "rest": 1.0, "head": 1.0}}], "must not name a weight twice"),
        ([{"strength": {"0:2": 0.1}}, {"strength": {"1:3": 0.1}}], r"two of them with overlapping ranges \(blocks\.1"),
        ([{"strength": {"0:2": 0.1}}, {"strength": 0.1}], "two of them with overlapping ranges"),
        ([{"strength": {"2:5": 0.1}}], r"must lie within the model's 3 layers"),
        ([{"strength": {"final_norm": 0.1}}], "must match something that the model has"),
    ],
)
def test_ranges_that_cannot_be(run: Run, stack: Any, callbacks: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(stack(), [1.0], *(L2SP(**settings) for settings in callbacks))


def test_nothing_left_to_anchor(run: Run, stack: Any) -> None:
    for callbacks in ([LayerFreezing("0:2"), L2SP({"0:2": 0.1})], [L2SP({"0:2": 0.1}), LayerFreezing("0:2")]):
        with pytest.raises(ValueError, match=r"L2SP.strength must name weights that train, got 0:2"):
            run(stack(), [1.0], *callbacks)


def test_two_with_ranges_apart(run: Run, stack: Any, seen: Any) -> None:
    run(stack(), [1.0, 0.0], L2SP({"0:1": 0.5}), L2SP({"1:3": 0.1}, "half"), seen)
    for name, gradient in seen.gradients[1].items():
        slope = 1.0 if name.startswith("blocks.0") else 0.1 if name.startswith("blocks") else 0.0
        torch.testing.assert_close(gradient, slope * (seen.weights[0][name] - seen.start[name]))


def test_a_second_list_of_like_size(run: Run, stack: Any, seen: Any) -> None:
    class Two(stack):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.decoder = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    with pytest.raises(ValueError, match=r"two lists of like size, .*layers_path="):
        run(Two(), [1.0], L2SP({"0:1": 0.5}))
    run(Two(), [1.0, 0.0], L2SP({"0:1": 0.5}, layers_path="decoder"), seen)
    moved = {name for name, gradient in seen.gradients[1].items() if gradient.abs().max() > 0}
    assert moved == {"decoder.0.weight", "decoder.0.bias"}


def test_a_range_that_a_built_module_lacks_stops_before_training(
    bert_folder: Path, text_file: Path, make_trainer: Any
) -> None:
    module = LitMLM(str(bert_folder))
    data = TextDataModule(str(text_file), sequence_length=48, val_share=0.1)
    trainer = make_trainer(max_steps=1, callbacks=[L2SP({"7:9": 0.1})])
    with pytest.raises(ValueError, match="7:9"):
        trainer.fit(module, data)
    assert trainer.global_step == 0
    assert not trainer.optimizers
