"""Models on disk, in each form that people have them in: the same tensors as the libraries themselves read."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lit_encoders.weights.checkpoint import (
    StoredTensor,
    open_stored,
    open_weights,
    read_safetensors,
    read_torch_file,
    under_names_of,
)

Tensors = Callable[[Path], dict[str, Tensor]]
DECODER = "cls.predictions.decoder.weight"
TABLE = "bert.embeddings.word_embeddings.weight"


def equal(stored: dict[str, StoredTensor], expected: dict[str, Tensor]) -> bool:
    assert stored.keys() == expected.keys()
    return all(
        tensor.dtype == expected[name].dtype and torch.equal(tensor.load(), expected[name])
        for name, tensor in stored.items()
    )


def as_torch_file(folder: Path, tensors: dict[str, Tensor], target: Path, shards: int = 1) -> Path:
    """The same model as ``pytorch_model.bin``, in one file or in several with an index."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    names = list(tensors)
    files = [f"pytorch_model-{number}.bin" for number in range(shards)] if shards > 1 else ["pytorch_model.bin"]
    for number, file in enumerate(files):
        torch.save({name: tensors[name] for name in names[number::shards]}, target / file)
    if shards > 1:
        weight_map = {name: files[number % shards] for number, name in enumerate(names)}
        (target / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return target


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int16, torch.bool]
)
def test_blocks_are_slices_of_the_whole(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    whole = (torch.randn(7, 11) * 3).to(dtype)
    save_file({"before": torch.ones(3, dtype=torch.uint8), "a": whole, "none": torch.zeros(0, 4)}, tmp_path / "f")
    found = read_safetensors(tmp_path / "f")
    assert torch.equal(found["a"].load(), whole)
    assert found["none"].load().shape == (0, 4)
    for start, stop in ((0, 1), (5, 40), (76, 77), (77, 77)):
        assert torch.equal(found["a"].read(start, stop), whole.reshape(-1)[start:stop])


@pytest.mark.parametrize("shards", [False, True])
def test_safetensors(make_model: Callable[..., Path], tensors: Tensors, shards: bool) -> None:
    folder = make_model(seed=3, shards=shards)
    assert len(list(folder.glob("*.safetensors"))) > 1 if shards else (folder / "model.safetensors").is_file()
    stored = open_stored(str(folder), "base")
    assert equal(stored.tensors, tensors(folder))
    assert stored.settings == json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("shards", [1, 3])
def test_torch_files(base: Path, tensors: Tensors, tmp_path: Path, shards: int) -> None:
    folder = as_torch_file(base, tensors(base), tmp_path / "bin", shards)
    assert equal(open_stored(str(folder), "base").tensors, tensors(base))


def test_torch_file_with_views_and_other_things(tmp_path: Path) -> None:
    """Several tensors in one storage, beside numbers that are no tensors."""
    table = torch.randn(10, 4)
    state = {"a": table, "b": table[3:5], "tied": table, "count": torch.tensor(3), "epoch": 7, "name": "x"}
    torch.save(state, tmp_path / "f.bin")
    expected = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    assert equal(read_torch_file(tmp_path / "f.bin"), expected)


def test_safetensors_come_before_other_files(base: Path, tensors: Tensors, tmp_path: Path) -> None:
    folder = as_torch_file(base, {TABLE: torch.zeros(1)}, tmp_path / "both")
    shutil.copy(base / "model.safetensors", folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {TABLE: "gone.safetensors"}}))
    assert equal(open_stored(str(folder), "base").tensors, tensors(base)), "as transformers chooses"


def test_checkpoint_of_a_run(checkpoint: Path) -> None:
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    weights = open_weights(str(checkpoint), "tuned")
    prefix = "backbone.model."
    assert weights.folder is None
    assert weights.architecture == "BertForMaskedLM"
    assert TABLE in weights.tensors
    assert DECODER not in weights.tensors
    for name, tensor in weights.tensors.items():
        assert torch.equal(tensor.load(), state[prefix + name])
    assert weights.layer_map.places.keys() == weights.tensors.keys()
    tokenizer = weights.load_tokenizer()
    assert tokenizer is not None
    assert tokenizer.mask_token == "[MASK]"


def test_tokenizer_is_none_where_there_is_none(make_model: Callable[..., Path]) -> None:
    assert open_stored(str(make_model(with_tokenizer=False)), "base").load_tokenizer() is None


@pytest.mark.parametrize("kept", ["table", "decoder", "both"])
def test_w03_tied_weight_stands_once_whatever_it_is_stored_as(
    base: Path, tensors: Tensors, edited: Callable[..., Path], kept: str
) -> None:
    table = tensors(base)[TABLE]
    assert DECODER not in tensors(base)
    changes = {"table": {}, "decoder": {TABLE: None, DECODER: table}, "both": {DECODER: table.clone()}}[kept]
    weights = open_weights(str(edited(base, changes)), "base")
    assert DECODER not in weights.tensors
    assert torch.equal(weights.tensors[TABLE].load(), table)
    assert len(weights.tensors) == len(tensors(base))


@pytest.mark.parametrize("prefix", ["", "module.", "backbone.model.", "_orig_mod."])
def test_w04_names_of_wrappers_come_off(base: Path, tensors: Tensors, edited: Callable[..., Path], prefix: str) -> None:
    changes: dict[str, Tensor | None] = {
        **dict.fromkeys(tensors(base)), **{prefix + name: tensor for name, tensor in tensors(base).items()}
    }  # fmt: skip
    assert equal(open_weights(str(edited(base, changes)), "base").tensors, tensors(base))


def test_w04_encoder_alone_takes_the_names_of_the_model_with_a_head(
    base: Path, make_model: Callable[..., Path]
) -> None:
    ours, encoder = open_weights(str(base), "base"), open_weights(str(make_model(architecture="BertModel")), "models")
    assert encoder.architecture == "BertModel"
    renamed = under_names_of(ours, encoder)
    assert {name for name in ours.tensors if name not in renamed.tensors} == {
        name for name in ours.tensors if name.startswith("cls.")
    }
    assert [name for name in renamed.tensors if name not in ours.tensors] == [
        "pooler.dense.weight",
        "pooler.dense.bias",
    ]
    back = under_names_of(encoder, ours)
    assert {name for name in encoder.tensors if name not in back.tensors} == {
        "pooler.dense.weight",
        "pooler.dense.bias",
    }


def test_norms_of_old_files(base: Path, tensors: Tensors, edited: Callable[..., Path]) -> None:
    changes: dict[str, Tensor | None] = {}
    for name, tensor in tensors(base).items():
        if "LayerNorm." in name:
            changes[name] = None
            changes[name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")] = (
                tensor
            )
    assert equal(open_weights(str(edited(base, changes)), "base").tensors, tensors(base))


def test_what_the_model_has_no_place_for_keeps_its_name(base: Path, edited: Callable[..., Path]) -> None:
    weights = open_weights(str(edited(base, {"extra.counter": torch.tensor(3)})), "base")
    assert weights.tensors["extra.counter"].load().item() == 3
    assert "extra.counter" not in weights.layer_map.places


def test_text_tower_of_gemma3(tmp_path: Path) -> None:
    """Files of the model that also sees: the vision tower is left as it is, the text's names are the text model's."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    sizes: dict[str, Any] = {
        "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8,
        "num_key_value_heads": 1, "intermediate_size": 24,
    }  # fmt: skip
    model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes))
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    stored = {name.replace("model.", "language_model.model.", 1): tensor for name, tensor in state.items()}
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": sizes}))
    weights = open_weights(str(tmp_path), "base")
    assert weights.architecture == "Gemma3ForCausalLM"
    assert weights.settings["model_type"] == "gemma3_text"
    assert equal(weights.tensors, state)


def bad(folder: Path, target: Path, change: Callable[[Path], object]) -> Path:
    shutil.copytree(folder, target)
    change(target)
    return target


def header(path: Path, entry: dict[str, Any], data: bytes = b"") -> None:
    text = json.dumps({"a": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "it holds no model.safetensors"),
    "no configuration": (lambda f: (f / "config.json").unlink(), "No such file"),
    "configuration that is cut off": (lambda f: (f / "config.json").write_text('{"model'), "Unterminated string"),
    "no model type": (lambda f: (f / "config.json").write_text("{}"), "'model_type'"),
    "no language model": (lambda f: (f / "config.json").write_text('{"model_type": "vit"}'), "ViTConfig"),
    "unknown model": (lambda f: (f / "config.json").write_text('{"model_type": "x-bert"}'), "x-bert"),
    "cut off in the data": (lambda f: os.truncate(f / "model.safetensors", 40_000), "model.safetensors is cut off"),
    "cut off in the header": (lambda f: os.truncate(f / "model.safetensors", 100), "is cut off or no safetensors file"),
    "empty file": (lambda f: (f / "model.safetensors").write_bytes(b""), "is cut off or no safetensors file"),
    "something else": (lambda f: (f / "model.safetensors").write_text("<html>" * 50), "or no safetensors file"),
    "unknown type": (
        lambda f: header(f / "model.safetensors", {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}, b"x"),
        "a has a type that is not supported, F8_E4M3",
    ),
    "shape and bytes": (
        lambda f: header(f / "model.safetensors", {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, b"xxxx"),
        "a has 4 bytes, which are not its shape's",
    ),
    "shard that is gone": (
        lambda f: (f / "model.safetensors").rename(f / "model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "gone.safetensors"}}'
        ),
        "No such file",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_models_that_cannot_be_read(base: Path, tmp_path: Path, case: str) -> None:
    change, reason = BAD[case]
    folder = bad(base, tmp_path / "bad", change)
    with pytest.raises(
        ValueError, match=r"^base must be a Hugging Face folder, a hub name or a training chec"
    ) as caught:
        open_weights(str(folder), "base")
    assert f"got '{folder}'" in str(caught.value)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["./nowhere", "/nowhere/at/all", "a/b/c", "nobody/nothing"])
def test_models_that_are_not_there(source: str) -> None:
    with pytest.raises(ValueError, match=f"^tuned must be a Hugging Face folder, .* got '{source}'"):
        open_weights(source, "tuned")


def test_torch_files_that_cannot_be_read(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(2), "made by code": tmp_path}, tmp_path / "code.bin")
    torch.save([torch.zeros(2)], tmp_path / "list.bin")
    torch.save({"a": torch.zeros(2, 3).T}, tmp_path / "columns.bin")
    (tmp_path / "cut.bin").write_bytes((tmp_path / "columns.bin").read_bytes()[:200])
    for name, message in (
        ("code", "code.bin holds more than plain tensors"),
        ("list", "list.bin holds no state, but a list"),
        ("columns", "columns.bin: a is not stored row by row"),
        ("cut", "cut.bin is no file that torch.save wrote"),
    ):
        with pytest.raises(ValueError, match=message):
            read_torch_file(tmp_path / f"{name}.bin")


def test_checkpoints_of_others(tmp_path: Path) -> None:
    torch.save({"state_dict": {"a": torch.zeros(2)}}, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match=r"it is no checkpoint of a LitEncoder"):
        open_weights(str(tmp_path / "other.ckpt"), "tuned")


def test_weights_of_another_model(base: Path, tensors: Tensors, edited: Callable[..., Path]) -> None:
    changes: dict[str, Tensor | None] = {**dict.fromkeys(tensors(base)), "a.b": torch.zeros(2)}
    with pytest.raises(ValueError, match="base must hold weights of a BertForMaskedLM, got none of its names in"):
        open_weights(str(edited(base, changes)), "base")
    with pytest.raises(ValueError, match=r"got \S+ of shape \[32\] instead of \[64\] in"):
        open_weights(str(edited(base, {"bert.encoder.layer.1.intermediate.dense.bias": torch.zeros(32)})), "base")


def test_reading_does_not_change_a_file(base: Path) -> None:
    before = load_file(base / "model.safetensors")
    weights = open_weights(str(base), "base")
    weights.tensors[TABLE].read(0, 10).zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in load_file(base / "model.safetensors").items())
