"""LitEncoder: the objective in one word, one division per step, validation that never moves."""

from __future__ import annotations

import copy
import csv
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lit_encoders import LitCLM, LitEncoder, LitMLM, Loss, TextDataModule
from lit_encoders.callbacks import HFExport, ObjectiveSchedule, Phase

MakeTrainer = Callable[..., Trainer]


class Scripted(LitMLM):
    """Micro-batches with given losses and numbers of targets: the loss is sum(losses) times one weight."""

    def __init__(self, folder: Path, script: list[tuple[float, int]], **settings: Any) -> None:
        super().__init__(str(folder), **settings)
        self.script = script
        self.weight = nn.Parameter(torch.ones(1))
        self.gradients: list[float | None] = []

    def training_loss(self, batch: Any) -> Loss:
        loss, count = self.script[self.trainer.fit_loop.epoch_loop.batch_idx % len(self.script)]
        total = (self.weight * loss * count).sum()
        return Loss(total, count, {"mlm_loss": (total.detach(), count)})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.weight], lr=0.0)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(None if self.weight.grad is None else self.weight.grad.item())


@pytest.fixture
def data(text_file: Path) -> TextDataModule:
    return TextDataModule(str(text_file), sequence_length=48, slots=96, val_share=0.1)


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_l01_gradient_and_loss_are_means_over_all_targets_of_a_step(
    bert_folder: Path, data: TextDataModule, make_trainer: MakeTrainer, accumulate: int
) -> None:
    script = {1: [(1.1, 10)], 2: [(2.0, 1), (1.0, 9)], 4: [(2.0, 1), (1.0, 3), (1.0, 0), (1.0, 6)]}[accumulate]
    module = Scripted(bert_folder, script)
    trainer = make_trainer(max_steps=3, accumulate_grad_batches=accumulate, limit_val_batches=0)
    trainer.fit(module, data)
    assert module.gradients == pytest.approx([1.1] * 3)
    assert trainer.callback_metrics["train/mlm_loss"].item() == pytest.approx(1.1)


def test_r03_a_short_last_window_is_no_weaker(
    bert_folder: Path, data: TextDataModule, make_trainer: MakeTrainer
) -> None:
    module = Scripted(bert_folder, [(1.0, 5)])
    trainer = make_trainer(limit_train_batches=6, max_epochs=1, accumulate_grad_batches=4, limit_val_batches=0)
    trainer.fit(module, data)
    assert module.gradients == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("targets", [10, 10_000])
def test_s04_a_gradient_added_by_a_callback_is_not_divided(
    bert_folder: Path, data: TextDataModule, make_trainer: MakeTrainer, accumulate: int, targets: int
) -> None:
    class Pull(Callback):
        def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
            pl_module.weight.grad += 0.25

    module = Scripted(bert_folder, [(2.0, targets)])
    trainer = make_trainer(max_steps=2, accumulate_grad_batches=accumulate, callbacks=[Pull()], limit_val_batches=0)
    trainer.fit(module, data)
    assert module.gradients == pytest.approx([2.25, 2.25])


def test_m01_a_step_without_targets_moves_nothing_and_counts(
    bert_folder: Path, data: TextDataModule, make_trainer: MakeTrainer
) -> None:
    class NoTargets(LitMLM):
        def training_loss(self, batch: Any) -> Loss:
            targets = self.targets(batch, "mlm", mask_ratio=1e-9, seed=self.seed, epoch=0)
            return Loss(self.pack_loss(batch, "mlm", targets), targets.num_targets)

    class Snapshots(Callback):
        seen: ClassVar[list[dict[str, torch.Tensor]]] = []

        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
            self.seen.append(copy.deepcopy(pl_module.backbone.state_dict()))

    module = NoTargets(str(bert_folder), learning_rate=1e-1)
    module.configure_model()
    before = copy.deepcopy(module.backbone.state_dict())  # type: ignore[union-attr]
    trainer = make_trainer(max_steps=2, callbacks=[Snapshots()], limit_val_batches=0)
    trainer.fit(module, data)
    assert trainer.global_step == 2
    for after in Snapshots.seen:
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert not trainer.optimizers[0].state


def test_l07_validation_weighs_by_targets(bert_folder: Path, data: TextDataModule, make_trainer: MakeTrainer) -> None:
    """L04, L05: 1 target of loss 2 and 9 of loss 1 are 1.1, perplexity exp(1.1); a batch without targets adds none."""

    class Given(LitMLM):
        script: ClassVar = [(2.0, 1), (1.0, 9), (7.0, 0)]

        def targets(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
            found = super().targets(batch, *args, **kwargs)
            self.count = self.script[batch.here.pack % 3][1]
            return type(found)(found.input_ids, found.rows[: self.count], found.labels[: self.count])

        def pack_loss(self, batch: Any, objective: Any, targets: Any) -> torch.Tensor:
            return torch.tensor(self.script[batch.here.pack % 3][0] * self.count)

    trainer = make_trainer(limit_val_batches=3)
    (result,) = trainer.validate(Given(str(bert_folder)), data, verbose=False)
    assert result["val/mlm_loss"] == pytest.approx(1.1)
    assert result["val/mlm_perplexity"] == pytest.approx(math.exp(1.1))


def test_m11_validation_does_not_move(bert_folder: Path, text_file: Path, make_trainer: MakeTrainer) -> None:
    """Equal with steps of learning rate 0 between, with workers, and with other packs."""

    def validate(module: LitEncoder, **settings: Any) -> tuple[float, float]:
        data = TextDataModule(str(text_file), sequence_length=48, val_share=0.2, **settings)
        (result,) = make_trainer().validate(module, data, verbose=False)
        return result["val/mlm_loss"], result["val/clm_loss"]

    module = LitMLM(str(bert_folder), learning_rate=0.0, weight_decay=0.0)
    first = validate(module, slots=96)
    make_trainer(max_steps=3, limit_val_batches=0).fit(
        module, TextDataModule(str(text_file), sequence_length=48, slots=96, val_share=0.2)
    )
    assert validate(module, slots=96) == first
    assert validate(module, slots=96, num_workers=2) == first
    assert validate(module, slots=384) == pytest.approx(first, abs=1e-6)


def test_validation_leaves_training_alone(bert_folder: Path, text_file: Path, make_trainer: MakeTrainer) -> None:
    """With dropout on, a run that validates at every step ends bit-equal to one that never does."""

    def train(**settings: Any) -> dict[str, torch.Tensor]:
        module = LitMLM(str(bert_folder), learning_rate=1e-2, seed=3)
        data = TextDataModule(str(text_file), sequence_length=48, slots=96, val_share=0.2, seed=3)
        make_trainer(max_steps=4, **settings).fit(module, data)
        assert module.backbone is not None
        return module.backbone.state_dict()

    never = train(limit_val_batches=0)
    always = train(val_check_interval=1, check_val_every_n_epoch=None)
    assert all(torch.equal(never[name], always[name]) for name in never)


def test_the_objective_is_one_word(bert_folder: Path, data: TextDataModule, make_trainer: MakeTrainer) -> None:
    module = LitMLM(str(bert_folder))
    trainer = make_trainer(max_steps=1, limit_val_batches=0)
    trainer.fit(module, data)
    batch = next(iter(data.train_dataloader()))
    assert not module.packing(batch, module.objective).causal
    assert module.training_loss(batch).terms.keys() == {"mlm_loss"}
    module.objective = "clm"
    assert module.packing(batch, module.objective).causal
    loss = module.training_loss(batch)
    assert loss.terms.keys() == {"clm_loss"}
    assert loss.num_targets == int((batch.lengths - 1).sum())
    with pytest.raises(ValueError, match="objective must be 'mlm' or 'clm', got 'rtd'"):
        module.objective = "rtd"  # type: ignore[assignment]


def test_a_tokenizer_without_mask_token(tmp_path: Path, text_file: Path, make_trainer: MakeTrainer) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"</s>": 0, "<unk>": 1, **{f"w{number}": number + 2 for number in range(90)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>").save_pretrained(tmp_path)
    config = {
        "model_type": "bert", "vocab_size": 92, "hidden_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": 64,
    }  # fmt: skip
    with pytest.raises(ValueError, match="mask_token="):
        LitMLM(config, tokenizer=str(tmp_path))
    module = LitCLM(config, tokenizer=str(tmp_path))
    data = TextDataModule(str(text_file), sequence_length=48, val_share=0.1)
    (result,) = make_trainer().validate(module, data, verbose=False)
    assert result.keys() == {"val/clm_loss", "val/clm_perplexity"}
    with pytest.raises(ValueError, match="mask_token="):
        module.objective = "mlm"
    assert LitMLM(config, tokenizer=str(tmp_path), mask_token="w7").mask_vocabulary is not None


def test_what_is_logged(bert_folder: Path, data: TextDataModule, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    module = LitMLM(str(bert_folder))
    logger = CSVLogger(tmp_path)
    trainer = make_trainer(max_steps=3, logger=logger, val_check_interval=1, check_val_every_n_epoch=None)
    trainer.fit(module, data)
    logged = set((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0].split(","))
    expected = {f"train/{name}" for name in ("mlm_loss", "tokens", "targets", "objective", "learning_rate")}
    expected |= {f"val/{objective}_{figure}" for objective in ("mlm", "clm") for figure in ("loss", "perplexity")}
    assert expected <= logged
    assert module.tokens == trainer.callback_metrics["train/tokens"].item() > 0


def test_a_loss_is_logged_only_at_steps_that_had_it(
    bert_folder: Path, data: TextDataModule, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    """Lightning keeps what was logged once and would repeat the MLM loss at every CLM step."""
    logger = CSVLogger(tmp_path)
    schedule = ObjectiveSchedule([Phase("a", "mlm", steps=2), Phase("b", "clm", steps=3), Phase("c", "mlm", steps=1)])
    make_trainer(callbacks=[schedule], logger=logger, limit_val_batches=0).fit(LitMLM(str(bert_folder)), data)
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").open()))
    logged = [(bool(row["train/mlm_loss"]), bool(row["train/clm_loss"])) for row in rows]
    assert logged == [(True, False)] * 2 + [(False, True)] * 3 + [(True, False)]


def test_r01_a_scheduler_steps_once_per_optimizer_step(
    bert_folder: Path, data: TextDataModule, make_trainer: MakeTrainer
) -> None:
    """R02: also under accumulation."""

    class Rates(Callback):
        def __init__(self) -> None:
            self.seen: list[float] = []

        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])

    rates = Rates()
    module = LitMLM(
        str(bert_folder),
        optimizer=lambda groups: torch.optim.SGD(groups, lr=1.0),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=4),
    )
    make_trainer(max_steps=4, accumulate_grad_batches=2, callbacks=[rates], limit_val_batches=0).fit(module, data)
    assert rates.seen == pytest.approx([0.1, 0.1, 0.325, 0.325, 0.55, 0.55, 0.775, 0.775])


def test_weights_are_float32_and_moments_too_under_bf16(
    bert_folder: Path, data: TextDataModule, make_trainer: MakeTrainer
) -> None:
    """B01, B03."""
    module = LitMLM(str(bert_folder))
    trainer = make_trainer(max_steps=1, precision="bf16-mixed", limit_val_batches=0)
    trainer.fit(module, data)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    moments = [state["exp_avg"].dtype for state in trainer.optimizers[0].state.values()]
    assert set(moments) == {torch.float32}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mask_ratio": 0.0}, r"model.mask_ratio must be in \(0, 1\], got 0.0"),
        ({"mask_ratio": 1.5}, r"model.mask_ratio must be in \(0, 1\], got 1.5"),
        ({"val_mask_ratio": -1.0}, "model.val_mask_ratio"),
        ({"corruption_ratio": 1.1}, "model.corruption_ratio"),
        ({"corruption": (0.5, 0.5, 0.5)}, "model.corruption must be three shares that sum to 1"),
        ({"learning_rate": -1.0}, "model.learning_rate must be at least 0"),
        ({"objective": "rtd"}, "objective must be 'mlm' or 'clm'"),
    ],
)
def test_values_out_of_range(bert_folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LitMLM(str(bert_folder), **settings)


def test_explicit_attention_is_refused_before_data_is_read(bert_folder: Path, make_trainer: MakeTrainer) -> None:
    """B04: the data does not even exist."""
    with pytest.raises(ValueError, match=r"model\.attention: 'flash_attn' is not available"):
        make_trainer(max_steps=1).fit(LitMLM(str(bert_folder), attention="flash_attn"), TextDataModule("missing.txt"))


def test_load_from_checkpoint_and_configure_model_twice(
    bert_folder: Path, data: TextDataModule, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    module = LitMLM(str(bert_folder), learning_rate=1e-2)
    trainer = make_trainer(max_steps=2, limit_val_batches=0)
    trainer.fit(module, data)
    backbone = module.backbone
    module.configure_model()
    assert module.backbone is backbone
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    torch.load(tmp_path / "run.ckpt", weights_only=True)  # U09: plain types only.
    loaded = LitMLM.load_from_checkpoint(tmp_path / "run.ckpt")
    assert loaded.learning_rate == 1e-2
    assert loaded.tokens == module.tokens
    states = [m.backbone.state_dict() for m in (module, loaded)]  # type: ignore[union-attr]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_whole_words_in_a_run(bert_folder: Path, data: TextDataModule, make_trainer: MakeTrainer) -> None:
    """In this vocabulary every token is a word: the same counts as token by token, and validation does not move."""
    module = LitMLM(str(bert_folder), whole_words=True, mask_ratio=0.3)
    trainer = make_trainer(max_steps=2, accumulate_grad_batches=2)
    trainer.fit(module, data)
    batch = next(iter(data.train_dataloader()))
    targets = module.targets(batch, "mlm", mask_ratio=1.0, seed=0, epoch=0)
    assert targets.num_targets == int(batch.eligible_span[:, 1].sum() - batch.eligible_span[:, 0].sum())
    (first,) = make_trainer().validate(module, data, verbose=False)
    assert make_trainer().validate(module, data, verbose=False) == [first]


@pytest.mark.parametrize("clm_head", ["copy", "fresh"])
def test_a_step_of_both_objectives_trains_both_heads(
    bert_folder: Path, data: TextDataModule, make_trainer: MakeTrainer, clm_head: str
) -> None:
    class Both(LitMLM):
        def training_loss(self, batch: Any) -> Loss:
            mlm = self.targets(batch, "mlm", mask_ratio=0.3, seed=self.seed, epoch=0)
            clm = self.targets(batch, "clm", mask_ratio=0.3, seed=self.seed, epoch=0)
            total = self.pack_loss(batch, "mlm", mlm) + self.pack_loss(batch, "clm", clm)
            return Loss(total, mlm.num_targets + clm.num_targets)

    module = Both(str(bert_folder), clm_head=clm_head, learning_rate=1e-2)  # type: ignore[arg-type]
    module.configure_model()
    before = copy.deepcopy(dict(module.named_parameters()))
    make_trainer(max_steps=2, limit_val_batches=0).fit(module, data)
    still = [name for name, parameter in module.named_parameters() if torch.equal(parameter, before[name])]
    assert still == []


@pytest.mark.parametrize(("dtype", "moves"), [("float32", True), ("bfloat16", False)])
def test_b01_steps_smaller_than_a_bf16_weight_s_precision(
    bert_folder: Path, data: TextDataModule, make_trainer: MakeTrainer, dtype: str, moves: bool
) -> None:
    """100 steps of 1e-3 on a weight of 1 under bf16-mixed: 0.9 with float32 weights; bf16 weights are warned of."""

    class One(LitMLM):
        def training_loss(self, batch: Any) -> Loss:
            return Loss(self.weight.float().sum(), 1)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([self.weight], lr=1e-3)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = One(str(bert_folder), dtype=dtype)  # type: ignore[arg-type]
    assert any("model.dtype bfloat16" in str(warning.message) for warning in caught) != moves
    module.weight = nn.Parameter(torch.ones(1, dtype=module.weight_dtype))
    make_trainer(max_steps=100, precision="bf16-mixed", limit_val_batches=0).fit(module, data)
    assert module.weight.item() == pytest.approx(0.9 if moves else 1.0, abs=5e-3)


@pytest.mark.parametrize("tied", [True, False])
def test_x07_ties_survive_a_step_and_an_export(
    bert_folder: Path, data: TextDataModule, make_trainer: MakeTrainer, tmp_path: Path, tied: bool
) -> None:
    from transformers import AutoModelForMaskedLM

    settings = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = {"model_type": "bert", "vocab_size": 95, "max_position_embeddings": 64, "tie_word_embeddings": tied}
    module = LitMLM({**config, **settings}, tokenizer=str(bert_folder), learning_rate=1e-2)
    trainer = make_trainer(max_steps=1, callbacks=[HFExport()], limit_val_batches=0)
    trainer.fit(module, data)
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "export")
    decoder, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert (decoder.data_ptr() == embedding.data_ptr()) == tied
    assert torch.equal(decoder, embedding) == tied
    assert module.backbone is not None
    assert torch.equal(decoder, module.backbone.decoder.weight)


def test_l09_the_logged_loss_does_not_depend_on_accumulation(
    bert_folder: Path, text_file: Path, make_trainer: MakeTrainer
) -> None:
    """Learning rate 0, no dropout: four packs log the same loss as one step of four and as four steps of one."""

    class Losses(Callback):
        def __init__(self) -> None:
            self.total = self.targets = 0.0

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.fit_loop.epoch_loop._should_accumulate():
                return
            targets = trainer.callback_metrics["train/targets"].item()
            self.total += trainer.callback_metrics["train/mlm_loss"].item() * targets
            self.targets += targets

    means = []
    for accumulate in (1, 4):
        module = LitMLM(str(bert_folder), learning_rate=0.0, weight_decay=0.0)
        module.config.hidden_dropout_prob = module.config.attention_probs_dropout_prob = 0.0
        losses = Losses()
        settings = {"max_steps": 4 // accumulate, "accumulate_grad_batches": accumulate, "limit_val_batches": 0}
        data = TextDataModule(str(text_file), sequence_length=48, slots=96, val_share=0.1)
        make_trainer(callbacks=[losses], **settings).fit(module, data)
        means.append(losses.total / losses.targets)
    assert means[0] == pytest.approx(means[1], rel=1e-5)


def test_c10_logits_of_a_pack_have_a_gradient_and_its_shape(
    bert_folder: Path, data: TextDataModule, make_trainer: MakeTrainer
) -> None:
    module = LitMLM(str(bert_folder))
    make_trainer(max_steps=1, limit_val_batches=0).fit(module, data)
    batch = next(iter(data.train_dataloader()))
    assert module.backbone is not None
    hidden = module.backbone.encode(batch.input_ids, batch.position_ids, module.packing(batch, "mlm"))
    assert hidden.shape == (96, 32)
    logits = module.backbone.logits(hidden)
    assert logits.shape == (96, 95)
    assert logits.requires_grad
