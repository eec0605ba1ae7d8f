"""``lit-encoders prune``: a folder that loads, its numbers, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

from lit_encoders import LitMLM
from lit_encoders.analysis.pruning import calibrate, parse_layers, prune_verb
from lit_encoders.cli import main
from lit_encoders.models.attention import PackLayout


@pytest.fixture(scope="session")
def ultrabert_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """Four queries to two keys, tied, with windows."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "UltrabertConfig"):
        pytest.skip("this version of transformers has no ultrabert")
    config = transformers.UltrabertConfig(
        vocab_size=95, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=48, max_position_embeddings=128, sliding_window=6, prediction_head_size=24,
        layer_types=["sliding_attention", "full_attention"] * 2, pad_token_id=0, bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("models") / "ultrabert"
    torch.manual_seed(0)
    transformers.UltrabertForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def logits(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one text, by our packed forward, and by plain transformers; nothing is missing or new."""
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)("w1 w2 w3 w5 w8 w13 w21 w34 w55 w89")["input_ids"])
    module = LitMLM(str(folder))
    module.configure_model()
    assert module.backbone is not None
    backbone = module.backbone.eval()
    plain, report = AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        ours = backbone.logits(backbone.encode(ids, torch.arange(len(ids)), PackLayout(np.array([len(ids)]))))
        return ours, plain.eval()(ids[None]).logits[0]


def test_everything_smaller_at_once(ultrabert_folder: Path, text_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "small"
    said = prune_verb(
        str(ultrabert_folder), output, str(text_file), layers="2", heads=2, mlp=24, hidden=16, tokens=2000.0
    )
    ours, plain = logits(output)
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    config = json.loads((output / "config.json").read_text())
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 16}
    assert config | sizes | {"intermediate_size": 24, "head_dim": 8} == config
    recipe = json.loads((output / "recipe.json").read_text())
    assert recipe | {"operation": "prune", "layers": 2, "heads": 2, "mlp": 24, "hidden": 16} == recipe
    assert recipe["text"] == str(text_file)
    assert 2000 <= recipe["tokens"] < 4500
    assert len(recipe["block_influence"]) == 4
    assert all(0 < influence < 2 for influence in recipe["block_influence"])
    assert recipe["inputs"][0]["source"] == str(ultrabert_folder)
    assert {"lit_encoders", "torch", "transformers"} == recipe["versions"].keys()
    after = sum(p.numel() for p in AutoModelForMaskedLM.from_pretrained(output).parameters())
    assert f"{after:,} after" in said


@pytest.mark.parametrize("sizes", [{"layers": "2"}, {"layers": "0,2"}, {"mlp": 32}])
def test_a_pruned_bert(bert_folder: Path, text_file: Path, tmp_path: Path, sizes: dict[str, Any]) -> None:
    prune_verb(str(bert_folder), tmp_path / "small", str(text_file), **sizes)
    ours, plain = logits(tmp_path / "small")
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    large = AutoModelForMaskedLM.from_pretrained(bert_folder)
    small = AutoModelForMaskedLM.from_pretrained(tmp_path / "small")
    assert len(small.bert.encoder.layer) == (2 if "layers" in sizes else 3)
    last = "bert.encoder.layer.{}.attention.self.query.weight"
    if sizes == {"layers": "0,2"}:
        assert torch.equal(small.state_dict()[last.format(1)], large.state_dict()[last.format(2)])


def test_layers_by_number_need_no_text_and_statistics_need_one(bert_folder: Path, tmp_path: Path) -> None:
    prune_verb(str(bert_folder), tmp_path / "given", layers="0,2")
    with pytest.raises(ValueError, match="text must name a calibration text where a size is measured, got none"):
        prune_verb(str(bert_folder), tmp_path / "counted", layers="2")


def test_a_dry_run_writes_nothing(bert_folder: Path, tmp_path: Path) -> None:
    """Parameters of a layer: 4 D^2 + 4 D of attention, 2 D I + I + D of the MLP, two norms of 2 D."""
    said = prune_verb(str(bert_folder), tmp_path / "small", layers="1", dry_run=True)
    size, inner = 32, 64
    layer = 4 * size * size + 4 * size + 2 * size * inner + inner + size + 4 * size
    before = sum(p.numel() for p in AutoModelForMaskedLM.from_pretrained(bert_folder).parameters())
    assert said == f"{before:,} parameters before, {before - 2 * layer:,} after ({1 - 2 * layer / before:.1%})"
    assert list(tmp_path.iterdir()) == []


def test_calibration_reads_each_token_of_the_text_once(bert_folder: Path, text_file: Path) -> None:
    words = [len(line.split()) + 2 for line in text_file.read_text().splitlines()]
    statistics = calibrate(LitMLM(str(bert_folder)), str(text_file), tokens=1e9)
    assert statistics.tokens == sum(words)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "prune needs at least one of layers, heads, mlp and hidden, got none"),
        (["--layers", "two"], "layers must be a number of layers, or which ones, such as 6 or 0,2,4, got 'two'"),
        (["--layers", "7"], "layers must be between 1 and the model's 3, got 7"),
        (["--heads", "2"], "heads of a bert must stay 4"),
        (["--mlp", "0"], "mlp must be between 1 and the model's 64, got 0"),
        (["--hidden", "16"], "hidden can be pruned for ultrabert alone, got 16 for bert"),
    ],
)
def test_what_is_refused(
    bert_folder: Path,
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    output = ["--output", str(tmp_path / "small"), "--text", str(text_file)]
    assert main(["prune", "--model", str(bert_folder), *output, *arguments]) != 0
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "small").exists()


def test_numbers_of_layers() -> None:
    assert parse_layers(None) is None
    assert parse_layers(" 0, 2 ,4") == [0, 2, 4]
    for text in ("", "-1", "1.5", "1,,2"):
        with pytest.raises(ValueError, match="layers must be a number of layers"):
            parse_layers(text)
