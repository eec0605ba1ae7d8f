"""Ranges set back: the base's bytes inside, the trained model's everywhere else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_encoders.models.layer_range import Part
from lit_encoders.weights.checkpoint import open_stored
from lit_encoders.weights.combine import digest_of
from lit_encoders.weights.revert import revert_verb

Tensors = Callable[[Path], dict[str, Tensor]]
TABLE = "bert.embeddings.word_embeddings.weight"
DECODER = "cls.predictions.decoder.weight"


def layer(*numbers: int, inside: tuple[str, ...] = ("",)) -> tuple[str, ...]:
    return tuple(f"bert.encoder.layer.{number}.{part}" for number in numbers for part in inside)


CASES: list[tuple[str, Part, tuple[str, ...]]] = [
    ("0:1", "all", layer(0)),
    ("-2:", "all", layer(1, 2)),
    ("all", "all", layer(0, 1, 2)),
    ("0:1,2:3", "all", layer(0, 2)),
    ("1:2, embeddings", "all", (*layer(1), "bert.embeddings.")),
    ("head", "all", ("cls.",)),
    ("all", "attention", layer(0, 1, 2, inside=("attention.",))),
    ("1:", "mlp", layer(1, 2, inside=("intermediate.", "output."))),
]


@pytest.mark.parametrize(("layers", "part", "inside"), CASES)
def test_inside_is_the_base_and_outside_the_trained_model(
    base: Path, tuned: Path, content: Any, load: Any, tmp_path: Path, layers: str, part: Part, inside: tuple[str, ...]
) -> None:
    revert_verb(str(base), str(tuned), layers, tmp_path / "out", part)
    b, t, got = content(base), content(tuned), content(tmp_path / "out")
    assert got == {name: (b if name.startswith(inside) else t)[name] for name in t}
    assert got not in (b, t)
    load(tmp_path / "out")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_bytes_of_other_types(
    make_model: Callable[..., Path], content: Any, load: Any, tmp_path: Path, dtype: Any
) -> None:
    base, tuned = make_model(seed=1, dtype=dtype), make_model(seed=2, dtype=dtype)
    revert_verb(str(base), str(tuned), "1:2", tmp_path / "out")
    b, t = content(base), content(tuned)
    assert content(tmp_path / "out") == {name: (b if name.startswith(layer(1)) else t)[name] for name in t}
    assert load(tmp_path / "out").dtype == dtype


def test_logits_are_those_of_a_live_model_set_back(
    base: Path, tuned: Path, load: Any, tokenizer: Any, tmp_path: Path
) -> None:
    revert_verb(str(base), str(tuned), "1:", tmp_path / "out")
    live, start = load(tuned), load(base)
    for number in (1, 2):
        live.bert.encoder.layer[number].load_state_dict(start.bert.encoder.layer[number].state_dict())
    ids = tokenizer("w1 w2 w3", return_tensors="pt")
    assert torch.equal(load(tmp_path / "out")(**ids).logits, live(**ids).logits)


@pytest.mark.parametrize("stores_it", ["base", "tuned", "neither"])
def test_w03_tied_head_goes_back_with_the_embeddings(
    base: Path, tuned: Path, edited: Any, tensors: Tensors, load: Any, tmp_path: Path, stores_it: str
) -> None:
    folders = {"base": base, "tuned": tuned}
    if stores_it in folders:
        folder = folders[stores_it]
        folders[stores_it] = edited(folder, {DECODER: tensors(folder)[TABLE].clone()})
    revert_verb(str(folders["base"]), str(folders["tuned"]), "embeddings", tmp_path / "out")
    assert DECODER not in tensors(tmp_path / "out")
    model = load(tmp_path / "out")
    assert torch.equal(model.get_output_embeddings().weight, tensors(base)[TABLE])
    assert model.get_output_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()


def test_w04_base_without_a_head(
    make_model: Callable[..., Path], tuned: Path, tensors: Tensors, load: Any, tmp_path: Path
) -> None:
    """The encoder that training began with, under its shorter names, is enough for its layers."""
    encoder = make_model(seed=9, architecture="BertModel", with_tokenizer=False)
    revert_verb(str(encoder), str(tuned), "0:1", tmp_path / "out")
    start, got = tensors(encoder), tensors(tmp_path / "out")
    for name, tensor in tensors(tuned).items():
        expected = start[name.removeprefix("bert.")] if name.startswith(layer(0)) else tensor
        assert torch.equal(got[name], expected)
    load(tmp_path / "out")
    with pytest.raises(ValueError, match=r"must hold the tensors of .*, lacks 5 tensors: cls"):
        revert_verb(str(encoder), str(tuned), "0:1,head", tmp_path / "again")


def test_w04_renamed_key_inside_the_range_is_an_error_outside_it_is_not(
    base: Path, tuned: Path, edited: Any, tensors: Tensors, tmp_path: Path
) -> None:
    name = f"{layer(1)[0]}output.dense.weight"
    renamed = edited(base, {name: None, name.replace("weight", "kernel"): tensors(base)[name]})
    with pytest.raises(ValueError, match=f"lacks 1 tensor: {name}"):
        revert_verb(str(renamed), str(tuned), "1:", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    revert_verb(str(renamed), str(tuned), "0:1", tmp_path / "out")


def test_base_of_another_type_keeps_its_bytes(make_model: Any, content: Any, load: Any, tmp_path: Path) -> None:
    base, tuned = make_model(seed=1), make_model(seed=2, dtype=torch.bfloat16)
    revert_verb(str(base), str(tuned), "0:1", tmp_path / "out")
    b, t, got = content(base), content(tuned), content(tmp_path / "out")
    assert got == {name: (b if name.startswith(layer(0)) else t)[name] for name in t}
    model = load(tmp_path / "out")
    assert model.dtype == torch.float32, "loading loses nothing of either"


def test_checkpoint_of_a_run(checkpoint: Path, bert_folder: Path, tensors: Tensors, load: Any, tmp_path: Path) -> None:
    revert_verb(str(bert_folder), str(checkpoint), "0:1", tmp_path / "out")
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    start = tensors(bert_folder)
    for name, tensor in tensors(tmp_path / "out").items():
        expected = start[name] if name.startswith(layer(0)) else state[f"backbone.model.{name}"]
        assert torch.equal(tensor, expected)
    load(tmp_path / "out")


def test_sharded_models(make_model: Any, content: Any, load: Any, tmp_path: Path) -> None:
    base, tuned = make_model(seed=1, shards=True), make_model(seed=2, shards=True)
    revert_verb(str(base), str(tuned), "0:1", tmp_path / "out")
    b, t = content(base), content(tuned)
    assert content(tmp_path / "out") == {name: (b if name.startswith(layer(0)) else t)[name] for name in t}
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()
    load(tmp_path / "out")


def test_recipe_and_text(base: Path, tuned: Path, tmp_path: Path) -> None:
    text = revert_verb(str(base), str(tuned), "1:,embeddings", tmp_path / "out", "all")
    recipe = json.loads((tmp_path / "out" / "recipe.json").read_text())
    assert {key: recipe[key] for key in ("operation", "layers", "part", "tensors")} == {
        "operation": "revert", "layers": ["1:", "embeddings"], "part": "all", "tensors": 37,
    }  # fmt: skip
    assert [entry["digest"] for entry in recipe["inputs"]] == [
        digest_of(open_stored(str(folder), "base")) for folder in (base, tuned)
    ]
    assert text.startswith(f"Set back 1:, embeddings: 37 tensors of '{base}'; all else is '{tuned}'.")
    assert f'from_pretrained("{tmp_path}/out")' in text


def test_number_instead_of_a_range(base: Path, tuned: Path, tmp_path: Path) -> None:
    """What YAML makes of an unquoted 9:28."""
    with pytest.raises(TypeError, match=r'layers must be text in quotes, such as "9:28" .*, got 568'):
        revert_verb(str(base), str(tuned), 568, tmp_path / "out")  # type: ignore[arg-type]


def test_output_that_exists(base: Path, tuned: Path, content: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="output must be a folder that does not exist yet"):
        revert_verb(str(base), str(tuned), "0:1", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_cut_off_file_leaves_nothing(base: Path, tuned: Path, edited: Any, tmp_path: Path) -> None:
    broken = edited(base, {})
    whole = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"base must be .* \(model.safetensors is cut off\)"):
        revert_verb(str(broken), str(tuned), "0:1", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == [broken.name]
