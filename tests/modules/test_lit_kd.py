"""LitKD: the loss by hand from plain transformers; a teacher that is read and otherwise not there."""

from __future__ import annotations

import copy
import itertools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from lit_encoders import LitEncoder, LitKD, MaskStream, TextDataModule
from lit_encoders.callbacks import CLMDetour
from lit_encoders.data.packs import PackedBatch
from lit_encoders.weights.export import export_checkpoint

MakeTrainer = Callable[..., Trainer]
STREAMS = [MaskStream("narrow", 0.1, 0.7, distill=True), MaskStream("wide", 0.5, 0.3, head="wide")]


def save_teacher(folder: Path, tokenizer: Any, kind: str = "bert", **settings: Any) -> Path:
    """A teacher wider than the student, with dropout in its configuration."""
    from transformers import AutoConfig, AutoModelForMaskedLM

    torch.manual_seed(11)
    shape = {
        "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
        "vocab_size": len(tokenizer), "max_position_embeddings": 128, "pad_token_id": 0,
    }  # fmt: skip
    config = AutoConfig.for_model(kind, **{**shape, **settings})
    model = AutoModelForMaskedLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)  # Sure of something, unlike a new model.
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    return save_teacher(tmp_path_factory.mktemp("teacher") / "bert", tokenizer)


@pytest.fixture
def batch(quiet_bert: Path, text_file: Path) -> PackedBatch:
    """Padding at its end."""
    data = TextDataModule(str(text_file), val=str(text_file), sequence_length=48, slots=200, tokenizer=str(quiet_bert))
    data.prepare_data()
    data.setup("fit")
    return next(batch for batch in data.train_dataloader() if 0 < batch.num_tokens < 200)


@pytest.fixture
def data(text_file: Path) -> TextDataModule:
    return TextDataModule(str(text_file), sequence_length=48, slots=192, val_share=0.1)


def make(folder: Path, teacher: Path, **settings: Any) -> LitKD:
    module = LitKD(str(folder), str(teacher), **{"dtype": "float64", "teacher_dtype": "float64", **settings})
    module.configure_model()
    return module


def plain_logits(folder: Path, ids: Tensor, batch: PackedBatch, objective: str) -> Tensor:
    """Each document alone through plain transformers, in float64, (T, V)."""
    from transformers import AutoModelForMaskedLM

    model = AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa").eval()
    found = []
    for part in ids.split(batch.segment_lengths.tolist()):
        settings = {}
        if objective == "clm":
            settings["attention_mask"] = torch.ones(len(part), len(part)).tril().bool()[None, None]
        with torch.no_grad():
            found.append(model(part[None], **settings).logits[0])
    return torch.cat(found)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("objective", ["mlm", "clm"])
def test_loss_by_hand_from_two_plain_models(
    quiet_bert: Path, teacher: Path, batch: PackedBatch, objective: Any, direction: Any
) -> None:
    """(1 - w) CE + w T^2 KL over the targets of a pack, its documents apart, masked or causal; L09: its two terms."""
    module = make(quiet_bert, teacher, temperature=2.0, direction=direction, kd_weight=0.3)
    module.objective = objective
    loss = module.training_loss(batch)
    targets = module.targets(batch, objective, mask_ratio=0.15, seed=module.seed, epoch=batch.here.epoch)
    student, theirs = (
        plain_logits(f, targets.input_ids, batch, objective)[targets.rows] for f in (quiet_bert, teacher)
    )
    ce = cross_entropy(student, targets.labels, reduction="sum").item()
    pair = [torch.log_softmax(x / 2.0, -1) for x in (student, theirs)]
    kd = 4 * kl_div(*(pair if direction == "forward" else pair[::-1]), reduction="sum", log_target=True).item()
    assert kd > 1
    assert loss.total.item() == pytest.approx(0.7 * ce + 0.3 * kd, rel=1e-9)
    terms = {name: total.item() for name, (total, _) in loss.terms.items()}
    assert terms == pytest.approx({f"{objective}_loss": ce, "kd_loss": kd}, rel=1e-9)
    assert {count for _, count in loss.terms.values()} == {len(targets.rows)} == {loss.num_targets}


def test_only_streams_that_distill_are_taught(quiet_bert: Path, teacher: Path, batch: PackedBatch) -> None:
    module = make(quiet_bert, teacher, streams=STREAMS, kd_weight=0.3)
    loss = module.training_loss(batch)
    members = module.dealer.members(batch)
    targets = module.targets(batch, "mlm", mask_ratio=module.dealer.ratios(members), seed=module.seed, epoch=0)
    narrow = torch.from_numpy(members)[batch.segment_ids[targets.rows]] == 0
    student, theirs = (plain_logits(f, targets.input_ids, batch, "mlm")[targets.rows] for f in (quiet_bert, teacher))
    ce = cross_entropy(student, targets.labels, reduction="none")
    p, q = (torch.log_softmax(x, -1) for x in (student, theirs))
    kd = kl_div(p, q, reduction="none", log_target=True).sum(-1)
    expected = torch.where(narrow, 0.7 * ce + 0.3 * kd, ce).sum()
    assert 0 < narrow.sum() < len(narrow)
    assert loss.total.item() == pytest.approx(expected.item(), rel=1e-6)  # Weights of targets are float32.
    assert loss.terms["narrow/kd_loss"][0].item() == pytest.approx(kd[narrow].sum().item(), rel=1e-9)
    assert loss.terms["kd_loss"][1] == int(narrow.sum())
    assert "wide/kd_loss" not in loss.terms


def test_a_model_teaches_itself_nothing(quiet_bert: Path, batch: PackedBatch) -> None:
    """D04: 0 when equal, and no gradient."""
    module = make(quiet_bert, quiet_bert, kd_weight=1.0, temperature=3.0)
    loss = module.training_loss(batch)
    assert loss.total.item() == pytest.approx(0.0, abs=1e-9)
    loss.total.backward()
    assert max(float(p.grad.abs().max()) for p in module.parameters() if p.grad is not None) < 1e-9


def test_d09_padding_and_positions_that_are_no_targets_change_nothing(
    quiet_bert: Path, teacher: Path, batch: PackedBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = make(quiet_bert, teacher)
    before = module.training_loss(batch).total
    ids = batch.input_ids.clone()
    ids[batch.num_tokens :] = 17
    assert torch.equal(module.training_loss(replace(batch, input_ids=ids)).total, before)
    rows = module.targets(batch, "mlm", mask_ratio=0.15, seed=module.seed, epoch=0).rows
    others = torch.ones(200, 1, dtype=torch.float64).index_fill(0, rows, 0.0)
    assert module.backbone is not None
    for backbone in (module.backbone, module._teacher[0]):
        encode = backbone.encode
        monkeypatch.setattr(backbone, "encode", lambda *a, encode=encode: encode(*a) + 5.0 * others)
    assert torch.equal(module.training_loss(batch).total, before)


def test_d09_no_target_gives_zero(quiet_bert: Path, teacher: Path, batch: PackedBatch) -> None:
    module = make(quiet_bert, teacher)
    module.mask_ratio = 1e-9
    loss = module.training_loss(batch)
    assert (loss.total.item(), loss.num_targets) == (0.0, 0)
    loss.total.backward()
    assert not any(p.grad.any() for p in module.parameters() if p.grad is not None)


def test_attention_of_another_kind_in_the_teacher(
    quiet_bert: Path, tokenizer: Any, batch: PackedBatch, tmp_path: Path
) -> None:
    """A ModernBERT with windows teaches a BERT: each packs by its own rules."""
    special = {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
    folder = save_teacher(tmp_path / "t", tokenizer, "modernbert", local_attention=8, **special)
    module = make(quiet_bert, folder, kd_weight=1.0)
    loss = module.training_loss(batch)
    targets = module.targets(batch, "mlm", mask_ratio=0.15, seed=module.seed, epoch=0)
    p, q = (
        torch.log_softmax(plain_logits(f, targets.input_ids, batch, "mlm")[targets.rows], -1)
        for f in (quiet_bert, folder)
    )
    assert loss.total.item() == pytest.approx(kl_div(p, q, reduction="sum", log_target=True).item(), rel=1e-5)


def test_a_teacher_of_a_larger_vocabulary_is_renormalised(
    quiet_bert: Path, tokenizer: Any, batch: PackedBatch, tmp_path: Path
) -> None:
    larger = copy.deepcopy(tokenizer)
    larger.add_tokens(["new1", "new2", "new3"])
    folder = save_teacher(tmp_path / "t", larger)
    with pytest.raises(ValueError, match=r"model.teacher must have the student's vocabulary of 95 tokens .* got 98"):
        make(quiet_bert, folder)
    module = make(quiet_bert, folder, truncate_vocabulary=True, kd_weight=1.0)
    loss = module.training_loss(batch)
    targets = module.targets(batch, "mlm", mask_ratio=0.15, seed=module.seed, epoch=0)
    student, theirs = (plain_logits(f, targets.input_ids, batch, "mlm")[targets.rows] for f in (quiet_bert, folder))
    assert theirs.shape[1] == 98
    q = torch.softmax(theirs, -1)[:, :95]
    q = q / q.sum(-1, keepdim=True)
    expected = (q * (q.log() - torch.log_softmax(student, -1))).sum().item()
    assert loss.total.item() == pytest.approx(expected, rel=1e-9)


def test_d06_d07_the_teacher_is_no_part_of_the_module(
    bert_folder: Path, teacher: Path, data: TextDataModule, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    """Weight decay on, clipped: bit-equal, without dropout, in no group, norm, count, state or file."""
    from lightning.pytorch.utilities.model_summary import summarize

    class Norms(Callback):
        def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
            (backbone,) = pl_module._teacher
            assert not backbone.training
            assert all(p.grad is None and not p.requires_grad for p in backbone.parameters())

    plain = LitEncoder(str(bert_folder))
    plain.configure_model()
    module = LitKD(str(bert_folder), str(teacher), learning_rate=1e-2, weight_decay=0.5)
    module.configure_model()
    (taught,) = module._teacher
    before = copy.deepcopy(taught.state_dict())
    trainer = make_trainer(max_steps=3, gradient_clip_val=1.0, callbacks=[Norms()], limit_val_batches=0)
    trainer.fit(module, data)
    module.train()
    assert module._teacher[0] is taught
    assert all(torch.equal(tensor, before[name]) for name, tensor in taught.state_dict().items())
    assert module.state_dict().keys() == plain.state_dict().keys()
    theirs = {id(parameter) for parameter in taught.parameters()}
    groups = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
    assert theirs.isdisjoint(map(id, [*groups, *module.parameters()]))
    size = sum(p.numel() for p in plain.parameters())
    assert sum(p.numel() for p in module.parameters()) == summarize(module).total_parameters == size
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    bytes_of_teacher = sum(x.numel() * x.element_size() for x in before.values())
    # Weights and two moments in float32, and 100 kB for all else.
    assert (tmp_path / "run.ckpt").stat().st_size < 12 * size + 100_000 < 12 * size + bytes_of_teacher


def test_d07_a_resumed_run_is_bit_equal(
    bert_folder: Path, teacher: Path, text_file: Path, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    def run(steps: int, ckpt: Path | None = None) -> tuple[Trainer, LitKD]:
        module = LitKD(str(bert_folder), str(teacher), streams=STREAMS, learning_rate=1e-2)
        trainer = make_trainer(max_steps=steps, limit_val_batches=0)
        text = TextDataModule(str(text_file), sequence_length=48, slots=192, val_share=0.1)
        trainer.fit(module, text, ckpt_path=None if ckpt is None else str(ckpt))
        return trainer, module

    run(2)[0].save_checkpoint(tmp_path / "two.ckpt")
    resumed, straight = run(4, tmp_path / "two.ckpt")[1], run(4)[1]
    expected = straight.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in resumed.state_dict().items())
    assert resumed.records() == straight.records()


def test_d07_a_checkpoint_without_its_teacher(
    bert_folder: Path, teacher: Path, data: TextDataModule, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    """A missing teacher stops a run at its start; an export, and the student as a LitEncoder, do not need it."""
    gone = tmp_path / "gone"
    shutil.copytree(teacher, gone)
    module = LitKD(str(bert_folder), str(gone), learning_rate=1e-2)
    trainer = make_trainer(max_steps=1, limit_val_batches=0)
    trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    loaded = LitKD.load_from_checkpoint(tmp_path / "run.ckpt")
    shutil.rmtree(gone)
    with pytest.raises(ValueError, match=r"model.teacher must be a folder or hub name .* got '.*gone'") as caught:
        LitKD(str(bert_folder), str(gone))
    assert "\n" not in str(caught.value)
    student = LitEncoder.load_from_checkpoint(tmp_path / "run.ckpt")
    for name, tensor in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
        assert torch.equal(student.state_dict()[name], tensor)
    export_checkpoint(tmp_path / "run.ckpt", tmp_path / "export")


def test_teachers_that_do_not_fit(
    bert_folder: Path, teacher: Path, tokenizer: Any, text_file: Path, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    from transformers import AutoModel

    data = TextDataModule(str(text_file), sequence_length=48, slots=96, val_share=0.1)
    short = save_teacher(tmp_path / "short", tokenizer, max_position_embeddings=32)
    with pytest.raises(ValueError, match=r"model.teacher must have positions for data.sequence_length \(48\), got 32"):
        make_trainer(max_steps=1).fit(LitKD(str(bert_folder), str(short)), data)

    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    text = (other / "tokenizer.json").read_text().replace('"w7"', '"www"').replace('"w8"', '"w7"')
    (other / "tokenizer.json").write_text(text.replace('"www"', '"w8"'))
    with pytest.raises(ValueError, match=r"model.teacher must have the model's vocabulary .* 2 of the model's missing"):
        make_trainer(max_steps=1).fit(LitKD(str(bert_folder), str(other)), data)

    bare = tmp_path / "bare"
    AutoModel.from_pretrained(teacher).save_pretrained(bare)
    tokenizer.save_pretrained(bare)
    with pytest.raises(ValueError, match=r"model.teacher must have all of its weights, got '.*bare' without cls"):
        make_trainer(max_steps=1).fit(LitKD(str(bert_folder), str(bare)), data)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, "model.temperature must be above 0, got 0.0"),
        ({"temperature": float("inf")}, "model.temperature must be above 0, got inf"),
        ({"kd_weight": -0.1}, r"model.kd_weight must be in \[0, 1\], got -0.1"),
        ({"kd_weight": 1.1}, r"model.kd_weight must be in \[0, 1\], got 1.1"),
        ({"direction": "both"}, "model.direction must be one of forward, reverse, got 'both'"),
        ({"distil_in": "rtd"}, "model.distil_in must be one of both, mlm, clm, got 'rtd'"),
        ({"streams": [MaskStream("a", 0.1, 1.0)]}, "model.streams must have a stream with distill .* got none"),
    ],
)
def test_values_out_of_range(bert_folder: Path, teacher: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        LitKD(str(bert_folder), str(teacher), **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("distil_in", ["both", "mlm", "clm"])
def test_distillation_through_a_detour(
    bert_folder: Path, teacher: Path, data: TextDataModule, make_trainer: MakeTrainer, distil_in: Any
) -> None:
    module = LitKD(str(bert_folder), str(teacher), distil_in=distil_in, clm_head="copy", learning_rate=1e-2)
    seen = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
            seen.append((pl_module.objective, "train/kd_loss" in pl_module.logged_losses))

    detour = CLMDetour(steps=4, decay_share=0.5, decay_mask_ratio=None, head_warmup_steps=2)
    make_trainer(callbacks=[detour, Watch()], limit_val_batches=0).fit(module, data)
    assert {objective for objective, _ in seen} == {"mlm", "clm"}
    for objective, logged in seen:
        assert logged == (distil_in in ("both", objective))


@pytest.mark.parametrize("settings", [{}, {"teacher_dtype": "bfloat16"}, {"compile": False, "whole_words": True}])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_precisions_agree(
    quiet_bert: Path, teacher: Path, data: TextDataModule, make_trainer: MakeTrainer, settings: Any, precision: Any
) -> None:
    def last(**options: Any) -> float:
        module = LitKD(str(quiet_bert), str(teacher), streams=STREAMS, learning_rate=1e-3, seed=1, **options)
        trainer = make_trainer(max_steps=2, precision=precision, limit_val_batches=0)
        trainer.fit(module, data)
        return trainer.callback_metrics["train/kd_loss"].item()

    exact = make(
        quiet_bert, teacher, streams=STREAMS, learning_rate=1e-3, seed=1, whole_words="whole_words" in settings
    )
    trainer = make_trainer(max_steps=2, limit_val_batches=0)
    trainer.fit(exact, data)
    assert last(**settings) == pytest.approx(trainer.callback_metrics["train/kd_loss"].item(), rel=3e-2)


def test_validation_does_not_ask_the_teacher(
    quiet_bert: Path, teacher: Path, data: TextDataModule, make_trainer: MakeTrainer
) -> None:
    results = [
        make_trainer().validate(module, data, verbose=False)
        for module in (LitEncoder(str(quiet_bert)), LitKD(str(quiet_bert), str(teacher), streams=STREAMS))
    ]
    assert results[0] == results[1]


def test_gradient_of_a_batch_repeated_is_the_same(
    quiet_bert: Path, teacher: Path, text_file: Path, make_trainer: MakeTrainer
) -> None:
    """D01: the same micro-batch three times in a step gives the step of one."""

    class Repeated(LitKD):
        def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
            self.first = getattr(self, "first", batch)
            return super().training_step(self.first, batch_idx)

    states = []
    for times in (1, 3):
        module = Repeated(str(quiet_bert), str(teacher), dtype="float64", teacher_dtype="float64", learning_rate=1e-2)
        text = TextDataModule(str(text_file), sequence_length=48, slots=96, val_share=0.1)
        make_trainer(max_steps=1, accumulate_grad_batches=times, limit_val_batches=0).fit(module, text)
        states.append(module.state_dict())
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-7, atol=1e-9)


def test_probe_parts_add_up_to_the_loss(quiet_bert: Path, teacher: Path, batch: PackedBatch) -> None:
    module = make(quiet_bert, teacher, streams=STREAMS, kd_weight=0.3)
    parts, divisor = module.loss_parts(batch)
    loss = module.training_loss(batch)
    assert list(parts) == ["narrow", "narrow.mlm", "narrow.kd", "wide"]
    assert divisor == loss.divisor
    values = {name: part.item() for name, part in parts.items()}
    assert values["narrow.mlm"] + values["narrow.kd"] == pytest.approx(values["narrow"], rel=1e-6)
    assert values["narrow"] + values["wide"] == pytest.approx(loss.total.item(), rel=1e-6)
    assert list(itertools.islice(parts, 1)) == ["narrow"]
