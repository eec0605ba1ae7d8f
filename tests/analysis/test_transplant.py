"""Layers of one model in another: the donor's bytes inside, the receiver's everywhere else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lit_encoders.analysis.transplant import transplant_verb
from lit_encoders.models.layer_range import Part


@pytest.fixture(scope="module")
def donor(bert_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A twin of ``bert_folder`` with other numbers throughout."""
    folder = tmp_path_factory.mktemp("donor")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((bert_folder / name).read_bytes())
    torch.manual_seed(7)
    state = {name: tensor + torch.randn_like(tensor) for name, tensor in stored(bert_folder).items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def stored(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("layers", "part", "marks"),
    [
        ("0:1", "all", ("layer.0.",)),
        ("all", "all", ("layer.",)),
        ("all", "attention", (".attention.",)),
        ("1:3", "mlp", tuple(f"layer.{n}.{part}." for n in (1, 2) for part in ("intermediate", "output"))),
        ("embeddings,-1:", "all", ("bert.embeddings.", "layer.2.")),
    ],
)
def test_layers_are_the_donors(
    bert_folder: Path, donor: Path, tmp_path: Path, layers: str, part: Part, marks: tuple[str, ...]
) -> None:
    from transformers import AutoModelForMaskedLM

    text = transplant_verb(str(donor), str(bert_folder), tmp_path / "out", layers, part)
    theirs, ours, got = stored(donor), stored(bert_folder), stored(tmp_path / "out")
    moved = {name for name in ours if any(mark in name for mark in marks)}
    assert all(torch.equal(got[name], (theirs if name in moved else ours)[name]) for name in ours)
    assert got.keys() == ours.keys()
    assert f"{len(moved)} tensors of '{donor}'; all else is '{bert_folder}'." in text
    recipe = json.loads((tmp_path / "out" / "recipe.json").read_text())
    assert (recipe["operation"], recipe["part"], recipe["tensors"]) == ("transplant", part, len(moved))
    _, report = AutoModelForMaskedLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_mistakes_name_the_option(bert_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^from must be a Hugging Face folder, .* got './none'"):
        transplant_verb("./none", str(bert_folder), tmp_path / "out")
    with pytest.raises(ValueError, match=r"^into must be a Hugging Face folder, .* got './none'"):
        transplant_verb(str(bert_folder), "./none", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
