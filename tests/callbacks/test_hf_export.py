"""HFExport and RunSummary: what a run leaves behind loads in plain transformers and says the truth."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from safetensors import safe_open
from transformers import AutoModelForMaskedLM, AutoTokenizer

from lit_encoders import LitMLM, TextDataModule
from lit_encoders.callbacks import CLMDetour, ExactResume, HFExport, RunSummary, Throughput
from lit_encoders.weights.export import export_checkpoint

MakeTrainer = Callable[..., Trainer]


def load(folder: Path) -> Any:
    model, report = AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def detour(
    folder: Path, text_file: Path, make_trainer: MakeTrainer, export: HFExport, **settings: Any
) -> tuple[Trainer, LitMLM, TextDataModule]:
    module = LitMLM(str(folder), learning_rate=1e-2)
    data = TextDataModule(str(text_file), sequence_length=48, slots=96, val_share=0.2)
    callbacks = [CLMDetour(steps=4, decay_share=0.5), Throughput(), export, RunSummary(), ExactResume()]
    trainer = make_trainer(callbacks=callbacks, num_sanity_val_steps=-1, enable_checkpointing=True, **settings)
    trainer.fit(module, data)
    return trainer, module, data


def plain_mlm_loss(model: Any, module: LitMLM, data: TextDataModule, autocast: bool) -> float:
    """The held-out MLM loss by plain transformers: each document alone, on the masks of the run's validation."""
    total, count = 0.0, 0
    for batch in data.val_dataloader()[0]:
        targets = module.targets(batch, "mlm", mask_ratio=0.15, seed=0, epoch=0)
        labels = torch.full_like(batch.input_ids, -100).index_copy(0, targets.rows, targets.labels)
        for ids, label in zip(
            targets.input_ids.split(batch.segment_lengths.tolist()),
            labels.split(batch.segment_lengths.tolist()),
            strict=True,
        ):
            wanted = int((label != -100).sum())
            if wanted:
                with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    total += model(ids[None], labels=label[None]).loss.item() * wanted
                count += wanted
    return total / count


@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-5), ("bf16-mixed", 1e-3)])
def test_the_export_has_the_loss_that_the_run_logged(
    bert_folder: Path, text_file: Path, make_trainer: MakeTrainer, tmp_path: Path, precision: str, tolerance: float
) -> None:
    """X01, X04, X09, W08: the full head, the right class, one copy of a tied matrix."""
    trainer, module, data = detour(bert_folder, text_file, make_trainer, HFExport(["detour"]), precision=precision)
    folder = tmp_path / "export"
    model = load(folder)
    assert type(model).__name__ == "BertForMaskedLM"
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["BertForMaskedLM"]
    assert model.cls.predictions.decoder.weight.data_ptr() == model.bert.embeddings.word_embeddings.weight.data_ptr()
    expected = trainer.callback_metrics["val/mlm_loss"].item()
    assert plain_mlm_loss(model, module, data, precision == "bf16-mixed") == pytest.approx(expected, abs=tolerance)
    assert len(AutoTokenizer.from_pretrained(folder)) == len(module.tokenizer)
    # The end of the detour is another model; both cards have their own losses.
    other = load(folder / "detour")
    assert not torch.equal(other.bert.embeddings.word_embeddings.weight, model.bert.embeddings.word_embeddings.weight)
    card = (folder / "README.md").read_text()
    assert f"{expected:.4f} nats" in card
    assert "`decay`: mlm, 2 optimizer steps" in card
    assert "`decay`" not in (folder / "detour" / "README.md").read_text()
    assert not list(folder.rglob(".*"))


def test_the_summary_has_a_row_per_phase(
    bert_folder: Path, text_file: Path, make_trainer: MakeTrainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, module, _ = detour(bert_folder, text_file, make_trainer, HFExport())
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [(p["name"], p["objective"], p["steps"]) for p in summary["phases"]] == [
        ("detour", "clm", 4),
        ("decay", "mlm", 2),
    ]
    assert sum(p["tokens"] for p in summary["phases"]) == summary["tokens"] == module.tokens
    start, end = summary["phases"][-1]["losses"]["val/mlm_loss"]
    assert end == trainer.callback_metrics["val/mlm_loss"].item() != start
    assert summary["phases"][0]["losses"]["val/mlm_loss"][1] == start
    printed = capsys.readouterr().out
    assert "judged downstream" in printed
    assert f'from_pretrained("{tmp_path / "export"}")' in printed


def test_milestones_in_tokens(bert_folder: Path, text_file: Path, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    detour(bert_folder, text_file, make_trainer, HFExport(at_tokens=[300, 100]))
    load(tmp_path / "export" / "tokens-100")
    card = (tmp_path / "export" / "tokens-300" / "README.md").read_text()
    tokens = int(next(line for line in card.splitlines() if "Tokens" in line).rpartition(" ")[2])
    assert 300 <= tokens < 300 + 96


def test_a_checkpoint_exports_to_the_same_bytes(
    bert_folder: Path, text_file: Path, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    detour(bert_folder, text_file, make_trainer, HFExport())
    export_checkpoint(tmp_path / "checkpoints" / "decay.ckpt", tmp_path / "again")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("export", "again")]
    assert weights[0] == weights[1]
    export_checkpoint(tmp_path / "checkpoints" / "decay.ckpt", tmp_path / "half", dtype="bfloat16")
    config = json.loads((tmp_path / "half" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    half = load(tmp_path / "half")
    assert half.dtype == torch.bfloat16
    with safe_open(tmp_path / "half" / "model.safetensors", "pt") as file:
        assert "cls.predictions.decoder.weight" not in file.keys(), "a tied matrix is stored once, cast or not"  # noqa: SIM118


def test_two_exports_side_by_side(
    bert_folder: Path, text_file: Path, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    """The one of base.yaml, and one that is added for milestones."""
    extra = HFExport(at_phases=["detour"], at_end=False)
    module = LitMLM(str(bert_folder))
    data = TextDataModule(str(text_file), sequence_length=48, slots=96, val_share=0.2)
    make_trainer(callbacks=[HFExport(), extra, CLMDetour(steps=2, decay_share=0.5)]).fit(module, data)
    load(tmp_path / "export")
    load(tmp_path / "export" / "detour")


def test_x05_training_from_a_bf16_folder_is_in_float32(
    bert_folder: Path, text_file: Path, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    detour(bert_folder, text_file, make_trainer, HFExport(dtype="bfloat16"))
    module = LitMLM(str(tmp_path / "export"))
    module.configure_model()
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}


@pytest.mark.parametrize("prefix", ["model.", "model.model.", "_orig_mod.", "module.", "backbone.model._orig_mod.", ""])
def test_x03_prefixes_of_wrappers(bert_folder: Path, tmp_path: Path, prefix: str) -> None:
    model = load(bert_folder)
    facts = {
        "config": json.dumps(model.config.to_dict()), "tokenizer": str(bert_folder), "base": "b", "data": [],
        "phases": [], "tokens": 0, "losses": {},
    }  # fmt: skip
    state = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    torch.save({"state_dict": state, "lit_encoders": facts}, tmp_path / "run.ckpt")
    export_checkpoint(tmp_path / "run.ckpt", tmp_path / "out")
    ids = torch.tensor([[2, 7, 8, 3]])
    assert torch.equal(load(tmp_path / "out")(ids).logits, model(ids).logits)


def test_x03_an_unknown_prefix_is_an_error(bert_folder: Path, tmp_path: Path) -> None:
    model = load(bert_folder)
    facts = {"config": json.dumps(model.config.to_dict()), "tokenizer": str(bert_folder)}
    state = {f"student.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"state_dict": state, "lit_encoders": facts}, tmp_path / "run.ckpt")
    with pytest.raises(ValueError, match=r"missing, .* unknown \("):
        export_checkpoint(tmp_path / "run.ckpt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_exports_that_cannot_be(bert_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="checkpoint must be a file that exists"):
        export_checkpoint(tmp_path / "none.ckpt", tmp_path / "out")
    (tmp_path / "cut.ckpt").write_bytes(b"PK\x03\x04cut off")
    with pytest.raises(ValueError, match="checkpoint must be readable"):
        export_checkpoint(tmp_path / "cut.ckpt", tmp_path / "out")
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match="must come from a LitEncoder"):
        export_checkpoint(tmp_path / "other.ckpt", tmp_path / "out")
    with pytest.raises(ValueError, match="output must be a folder that does not exist"):
        export_checkpoint(tmp_path / "other.ckpt", tmp_path)


def test_callbacks_refuse_what_they_cannot_do(bert_folder: Path, text_file: Path, make_trainer: MakeTrainer) -> None:
    class Plain(LightningModule):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise AssertionError

        def configure_optimizers(self) -> None:
            return None

    with pytest.raises(TypeError, match=r"HFExport needs a LitEncoder .*, got Plain"):
        make_trainer(max_steps=1, callbacks=[HFExport()]).fit(Plain(), [torch.zeros(1)])
    with pytest.raises(ValueError, match=r"name phases of the schedule \(detour, decay\), got 'decai'"):
        detour(bert_folder, text_file, make_trainer, HFExport(["decai"]))
    with pytest.raises(ValueError, match="at_tokens must be above 0"):
        HFExport(at_tokens=[0])
