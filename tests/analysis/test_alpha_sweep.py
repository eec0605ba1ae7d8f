"""Alpha sweeps against models that were interpolated on disk, and measured on their own."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lit_encoders import LitMLM, TextDataModule
from lit_encoders.analysis.alpha_sweep import alpha_sweep
from lit_encoders.cli import main
from lit_encoders.models.layer_range import LayerRange
from lit_encoders.weights.checkpoint import open_weights
from lit_encoders.weights.interpolate import interpolate


@pytest.fixture(scope="module")
def tuned_folder(bert_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base, moved by noise that losses can see."""
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("models") / "tuned"
    model = AutoModelForMaskedLM.from_pretrained(bert_folder)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(bert_folder).save_pretrained(folder)
    return folder


@pytest.fixture
def data(text_file: Path, bert_folder: Path) -> TextDataModule:
    return TextDataModule(str(text_file), val={"a": str(text_file)}, sequence_length=48, slots=512)


def losses_of(folder: Path, data: TextDataModule) -> dict[str, float]:
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.validate(LitMLM(str(folder)), data, verbose=False)
    return {name: float(v) for name, v in trainer.callback_metrics.items() if name.endswith("loss")}


def test_each_point_is_the_interpolated_model(
    bert_folder: Path, tuned_folder: Path, data: TextDataModule, tmp_path: Path
) -> None:
    base, tuned = (open_weights(str(folder), "model") for folder in (bert_folder, tuned_folder))
    module = LitMLM(str(tuned_folder))
    points = alpha_sweep(module, base, ["0:2", "embeddings"], [0.0, 0.5, 1.0], data, accelerator="cpu")
    assert [(point.layers, point.alpha) for point in points] == [
        (layers, alpha) for layers in ("0:2", "embeddings") for alpha in (0.0, 0.5, 1.0)
    ]
    for point in points[:3]:
        folder = tmp_path / f"{point.alpha}"
        interpolate(base, tuned, [point.alpha], folder, LayerRange("0:2"))
        assert point.losses == pytest.approx(losses_of(folder, data), abs=1e-6)
    assert points[0].losses != points[1].losses
    assert points[2].losses == points[5].losses
    # The module has its trained weights again.
    trained = dict(parameters_of(tuned_folder))
    assert all(torch.equal(parameter, trained[name]) for name, parameter in module.backbone.model.named_parameters())


def parameters_of(folder: Path) -> list[tuple[str, torch.Tensor]]:
    from transformers import AutoModelForMaskedLM

    return list(AutoModelForMaskedLM.from_pretrained(folder).named_parameters())


def test_the_verb_writes_a_table_and_a_picture(
    bert_folder: Path, tuned_folder: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "sweep"
    models = [f"--base={bert_folder}", f"--tuned={tuned_folder}", f"--output={output}"]
    options = ["--layers=0:1,1:3", f"--val.a={text_file}", "--alpha=0,1", "--packs=1"]
    assert main(["alpha-sweep", *models, *options]) == 0
    assert "1:3" in capsys.readouterr().out
    with (output / "alpha_sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["layers"], row["alpha"]) for row in rows} == {(r, a) for r in ("0:1", "1:3") for a in ("0.0", "1.0")}
    assert (output / "alpha_sweep.png").read_bytes().startswith(b"\x89PNG")


def test_a_decoder_without_a_mask_token_is_measured_by_clm(
    make_tokenizer: Any, text_file: Path, tmp_path: Path
) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 95}
    folder = tmp_path / "gpt2"
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=2, eos_token_id=3)).save_pretrained(folder)
    make_tokenizer(mask_token=None).save_pretrained(folder)
    models = [f"--base={folder}", f"--tuned={folder}", f"--output={tmp_path / 'sweep'}"]
    assert main(["alpha-sweep", *models, "--layers=0:1", f"--val.a={text_file}", "--alpha=0", "--packs=1"]) == 0
    text = (tmp_path / "sweep" / "alpha_sweep.csv").read_text()
    assert "a/clm_loss" in text
    assert "mlm" not in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layers=0:9", "--val.a=TEXT"], "layers must lie within the model's 3 layers (0:3), got '0:9'"),
        (["--layers=0:1", "--val.a=nowhere.txt"], "val.a must name files that exist, got 'nowhere.txt'"),
        (["--layers=0:1", "--val.a=TEXT", "--alpha=a"], "alpha must be numbers with commas between them"),
    ],
)
def test_mistakes_are_one_line(
    bert_folder: Path,
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    models = [f"--base={bert_folder}", f"--tuned={bert_folder}", f"--output={tmp_path / 'sweep'}"]
    assert main(["alpha-sweep", *models, *(option.replace("TEXT", str(text_file)) for option in options)]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error
    assert not (tmp_path / "sweep").exists()
