"""The weight verbs as a user types them: what they write, and that each mistake is one line and leaves nothing."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

KEY = "bert.encoder.layer.1.output.dense.weight"


def stored(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def models(tmp_path: Path, bert_folder: Path) -> Path:
    """A folder with ``base`` and ``tuned``, and models that something is wrong with."""
    folder = tmp_path / "models"
    shutil.copytree(bert_folder, folder / "base")
    state = stored(bert_folder)
    torch.manual_seed(1)
    tuned = {name: tensor + torch.randn_like(tensor) for name, tensor in state.items()}

    def variant(name: str, tensors: dict[str, Tensor], **settings: Any) -> None:
        shutil.copytree(bert_folder, folder / name)
        save_file(tensors, folder / name / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((bert_folder / "config.json").read_text())
        (folder / name / "config.json").write_text(json.dumps({**config, **settings}))

    variant("tuned", tuned)
    variant("lacking", {name: tensor for name, tensor in state.items() if name != KEY})
    variant("more", {**state, **{f"more.{number:02}": torch.zeros(1) for number in range(12)}})
    word = "bert.embeddings.word_embeddings.weight"
    variant(
        "vocabulary",
        {**state, word: torch.cat([state[word], state[word][:1]]), "cls.predictions.bias": torch.zeros(96)},
        vocab_size=96,
    )
    variant("cut", state)
    os.truncate(folder / "cut" / "model.safetensors", 50_000)
    sizes: dict[str, Any] = {
        "vocab_size": 95,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "pad_token_id": 0,
    }
    from transformers import RobertaConfig, RobertaForMaskedLM

    RobertaForMaskedLM(RobertaConfig(**sizes, intermediate_size=64)).save_pretrained(folder / "roberta")
    return folder


def typed(models: Path, line: str) -> list[str]:
    return [word.format(m=models) for word in line.split()]


def test_revert(run: Any, models: Path) -> None:
    code, out, err = run("revert", *typed(models, "--base={m}/base --tuned={m}/tuned --layers=1:2 --output=out"))
    assert (code, err) == (0, "")
    base, tuned = stored(models / "base"), stored(models / "tuned")
    expected = {n: (base if n.startswith("bert.encoder.layer.1.") else t)[n] for n, t in ((n, tuned) for n in tuned)}
    assert same(stored(Path("out")), expected)
    assert 'AutoModelForMaskedLM.from_pretrained("out")' in out


@pytest.mark.parametrize("layers", [["--layers", "0:1"], ["--layers=-2:"], ["--layers", "0:1,2:3,embeddings"]])
def test_ranges_are_text(run: Any, models: Path, layers: list[str]) -> None:
    code, _, err = run("revert", *typed(models, "--base={m}/base --tuned={m}/tuned --output=out"), *layers)
    assert (code, err) == (0, "")
    recipe = json.loads(Path("out/recipe.json").read_text())
    assert recipe["layers"] == layers[-1].removeprefix("--layers=").split(",")


@pytest.mark.parametrize(
    "line",
    [
        "revert --base={m}/base --tuned={m}/tuned --output=out",
        "interpolate --base={m}/base --tuned={m}/tuned --alpha=0.5 --output=out",
        "transplant --from={m}/base --into={m}/tuned --output=out",
        "drift {m}/base {m}/tuned --output=out",
    ],
)
@pytest.mark.parametrize("text", ["9:28", "1:30"])
def test_a_range_that_yaml_would_read_as_a_number_is_text(run: Any, models: Path, line: str, text: str) -> None:
    """9:28 is 568 in YAML 1.1; here it is a range, and one that this model does not have."""
    code, _, err = run(*typed(models, line), "--layers", text)
    assert code == 2
    assert err == (f"lit-encoders: error: layers must lie within the model's 3 layers (0:3), got {text!r}\n")


def test_soup(run: Any, models: Path) -> None:
    two = typed(models, "{m}/base {m}/tuned")
    code, _, err = run("soup", *two, "--output=mean")
    assert (code, err) == (0, "")
    base, tuned = stored(models / "base"), stored(models / "tuned")
    assert same(stored(Path("mean")), {n: ((base[n].double() + tuned[n].double()) / 2).float() for n in base})
    assert run("soup", *two, "--weights=.25,.75", "--output=weighted")[0] == 0
    weighted = {n: (0.25 * base[n].double() + 0.75 * tuned[n].double()).float() for n in base}
    assert same(stored(Path("weighted")), weighted)
    assert run("soup", *two, "--weights=1,3", "--normalise", "--output=again")[0] == 0
    assert same(stored(Path("again")), weighted)
    assert run("soup", *two, f"--base={models}/base", "--alpha=0", "--output=start")[0] == 0
    assert same(stored(Path("start")), base)


def test_w01_weights_that_do_not_sum_to_one(run: Any, models: Path) -> None:
    twice = typed(models, "{m}/base {m}/base --weights=.1,1.0")
    code, _, err = run("soup", *twice, "--output=out")
    assert code == 2
    assert err == (
        "lit-encoders: error: weights must sum to 1, or --normalise or --no-normalise say what is meant, got 1.1\n"
    )
    assert run("soup", *twice, "--normalise", "--output=on")[0] == 0
    assert run("soup", *twice, "--no-normalise", "--output=off")[0] == 0
    base = stored(models / "base")
    assert same(stored(Path("on")), base)
    assert same(stored(Path("off")), {name: (1.1 * tensor.double()).float() for name, tensor in base.items()})


def test_w04_not_strict(run: Any, models: Path) -> None:
    code, out, err = run("soup", *typed(models, "{m}/base {m}/lacking {m}/more --strict=false --output=out"))
    assert (code, err) == (0, "")
    assert f"Not in every model, taken from the first: 1 tensor: {KEY}" in out
    assert "Not in the first model, left out: 12 tensors: more.00, " in out


def test_interpolate(run: Any, models: Path) -> None:
    code, _, err = run("interpolate", *typed(models, "--base={m}/base --tuned={m}/tuned --alpha=0,.5,1 --output=out"))
    assert (code, err) == (0, "")
    base, tuned = stored(models / "base"), stored(models / "tuned")
    assert same(stored(Path("out/alpha-0")), base)
    assert same(stored(Path("out/alpha-1")), tuned)
    assert same(stored(Path("out/alpha-0.5")), {n: ((base[n].double() + tuned[n].double()) / 2).float() for n in base})


def test_transplant(run: Any, models: Path) -> None:
    code, _, err = run("transplant", *typed(models, "--from={m}/tuned --into={m}/base --part=attention --output=out"))
    assert (code, err) == (0, "")
    base, tuned = stored(models / "base"), stored(models / "tuned")
    assert same(stored(Path("out")), {n: (tuned if ".attention." in n else base)[n] for n in base})


def test_drift_and_layers(run: Any, models: Path) -> None:
    code, out, err = run("drift", *typed(models, "{m}/base {m}/tuned --layers=0:2,head --output=out"))
    assert (code, err) == (0, "")
    assert {path.name for path in Path("out").iterdir()} == {"drift.csv", "drift.png"}
    assert "everything" in out
    code, out, err = run("layers", str(models / "base"))
    assert (code, err) == (0, "")
    assert "BertForMaskedLM: 3 layers" in out


REVERT = "revert --base={m}/%s --tuned={m}/%s --layers=0:1 --output=%s"
MISTAKES: dict[str, tuple[str, str]] = {
    "no such base": (REVERT % ("none", "tuned", "out"), "base must be a Hugging Face folder, a hub name or a training"),
    "no such tuned": (REVERT % ("base", "none", "out"), "tuned must be a Hugging Face folder, a hub name or a train"),
    "cut-off file": (REVERT % ("cut", "tuned", "out"), "(model.safetensors is cut off)"),
    "architecture": (REVERT % ("roberta", "tuned", "out"), "models must have one architecture, got bert and roberta"),
    "vocabulary": (REVERT % ("vocabulary", "tuned", "out"), "one vocabulary, got vocab_size 95 and 96 in"),
    "output that exists": (REVERT % ("base", "tuned", "{m}"), "output must be a folder that does not exist yet, got"),
    "output that cannot be": (REVERT % ("base", "tuned", "/proc/x"), "output must be a folder that can be made, got"),
    "range beyond": (
        "revert --base={m}/base --tuned={m}/tuned --layers=0:4 --output=out",
        "layers must lie within the model's 3 layers (0:3), got '0:4'",
    ),
    "no range": (
        "revert --base={m}/base --tuned={m}/tuned --layers=first --output=out",
        "layers must be like '0:8' or '-6:', or one of 'all', 'embeddings', 'final_norm', 'head', got 'first'",
    ),
    "part that is not there": (
        "revert --base={m}/base --tuned={m}/tuned --layers=final_norm --output=out",
        "layers must match something that the model has (layers, embeddings, head), got 'final_norm'",
    ),
    "unknown part": (
        "revert --base={m}/base --tuned={m}/tuned --layers=0:1 --part=ffn --output=out",
        "part must be one of 'all', 'attention', 'mlp', got 'ffn'",
    ),
    "no layers": ("revert --base={m}/base --tuned={m}/tuned --output=out", "layers"),
    "unknown option": ("revert --base={m}/base --tuned={m}/tuned --layers=0:1 --output=out --parts=mlp", "--parts"),
    "missing tensor": ("soup {m}/base {m}/lacking --output=out", f"lacks 1 tensor: {KEY}"),
    "extra tensors": ("soup {m}/base {m}/more --output=out", "has 12 tensors: more.00, more.01, more.02, more.03, mo"),
    "one model": ("soup {m}/base --output=out", "models must be at least two, or one with a base, got 1"),
    "no model": ("soup --output=out", "models must be at least two, or one with a base, got 0"),
    "soup over another": ("soup {m}/base {m}/tuned --output={m}/base", "output must be a folder that does not exist"),
    "number of weights": ("soup {m}/base {m}/tuned --weights=1 --output=out", "weights must be one for each of the 2"),
    "weights of 0": (
        "soup {m}/base {m}/tuned --weights=0,0 --no-normalise --output=out",
        "weights must not be all 0",
    ),
    "weights that are words": (
        "soup {m}/base {m}/tuned --weights=half,half --output=out",
        "weights must be numbers with commas between them, such as 0,.25,1, got 'half,half'",
    ),
    "alpha without a base": ("soup {m}/base {m}/tuned --alpha=.5 --output=out", "alpha must come with a base"),
    "alpha that is a word": (
        "interpolate --base={m}/base --tuned={m}/tuned --alpha=half --output=out",
        "alpha must be numbers with commas between them, such as 0,.25,1, got 'half'",
    ),
    "alpha twice": (
        "interpolate --base={m}/base --tuned={m}/tuned --alpha=1,1 --output=out",
        "alpha must be at least one number, each once, got [1.0, 1.0]",
    ),
    "donor": ("transplant --from={m}/none --into={m}/base --output=out", "from must be a Hugging Face folder"),
    "receiver": ("transplant --from={m}/base --into={m}/none --output=out", "into must be a Hugging Face folder"),
    "drift of one": ("drift {m}/base", "models must be a base and at least one trained from it, got 1"),
    "drift of others": ("drift {m}/base {m}/vocabulary --output=out", "one vocabulary, got vocab_size 95 and 96"),
    "layers of nothing": ("layers {m}/none", "model must be a Hugging Face folder"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_one_line(run: Any, models: Path, case: str) -> None:
    line, message = MISTAKES[case]
    before = {path: path.stat().st_mtime_ns for path in models.rglob("*")}
    code, out, err = run(*typed(models, line))
    assert code == 2
    assert err.startswith("lit-encoders: error: ")
    assert len(err.splitlines()) == 1
    assert message in err
    assert out == ""
    assert list(Path.cwd().iterdir()) == [], "nothing is left behind"
    assert {path: path.stat().st_mtime_ns for path in models.rglob("*")} == before
