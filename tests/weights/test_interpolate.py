"""The way from a base to a trained model: its ends are the two models, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lit_encoders.weights.interpolate import interpolate_verb

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
Tensors = Callable[[Path], dict[str, Tensor]]


def walk(base: Path, tuned: Path, alpha: list[float], output: Path, layers: str | None = None) -> str:
    return interpolate_verb(str(base), str(tuned), alpha, output, layers)


@pytest.mark.parametrize("dtype", FLOATS)
def test_w01_alpha_0_is_the_base_and_alpha_1_the_trained_model(
    make_model: Callable[..., Path], content: Any, load: Any, tmp_path: Path, dtype: Any
) -> None:
    base, tuned = (make_model(seed=seed, dtype=dtype) for seed in (1, 2))
    walk(base, tuned, [0.0, 1.0, 0.5], tmp_path / "out")
    assert content(tmp_path / "out" / "alpha-0") == content(base)
    assert content(tmp_path / "out" / "alpha-1") == content(tuned)
    assert content(tmp_path / "out" / "alpha-0.5") not in (content(base), content(tuned))
    for name in ("alpha-0", "alpha-0.5", "alpha-1"):
        assert load(tmp_path / "out" / name).dtype == dtype


def test_w01_ends_are_exact_down_to_nan_and_the_sign_of_zero(
    base: Path, tuned: Path, edited: Any, content: Any, tmp_path: Path
) -> None:
    name = "bert.encoder.layer.1.output.dense.bias"
    folders = []
    for folder, start in ((base, 0x7FC01234), (tuned, 0x00000001)):
        bits = torch.arange(start, start + 32, dtype=torch.int64).to(torch.int32)
        bits[:4] = torch.tensor([-(2**31), 0x7F800000, 0x7FFFFFFF, 0], dtype=torch.int32)  # -0, inf, NaN, 0
        folders.append(edited(folder, {name: bits.view(torch.float32)}))
    walk(*folders, [0.0, 1.0], tmp_path / "out")
    assert content(tmp_path / "out" / "alpha-0") == content(folders[0])
    assert content(tmp_path / "out" / "alpha-1") == content(folders[1])


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.75, 1.25, -0.5])
def test_between_is_the_float64_formula(
    base: Path, tuned: Path, tensors: Tensors, tmp_path: Path, alpha: float
) -> None:
    walk(base, tuned, [alpha], tmp_path / "out")
    b, t, got = tensors(base), tensors(tuned), tensors(tmp_path / "out")
    for name, tensor in got.items():
        expected = (1 - alpha) * b[name].numpy().astype(np.float64) + alpha * t[name].numpy().astype(np.float64)
        assert np.array_equal(tensor.numpy(), expected.astype(np.float32))


def test_ranges_alone(base: Path, tuned: Path, tensors: Tensors, tmp_path: Path) -> None:
    walk(base, tuned, [0.0, 0.5], tmp_path / "out", "1:2,embeddings")
    b, t = tensors(base), tensors(tuned)
    inside = ("bert.encoder.layer.1.", "bert.embeddings.")
    for alpha in (0.0, 0.5):
        got = tensors(tmp_path / "out" / f"alpha-{alpha:g}")
        for name in t:
            w = alpha if name.startswith(inside) else 1.0
            assert torch.equal(got[name], ((1 - w) * b[name].double() + w * t[name].double()).float())


def test_ends_keep_the_type_that_they_have(
    make_model: Callable[..., Path], content: Any, load: Any, tmp_path: Path
) -> None:
    base, tuned = make_model(seed=1, dtype=torch.bfloat16), make_model(seed=2)
    walk(base, tuned, [0.0, 0.5, 1.0], tmp_path / "out")
    assert content(tmp_path / "out" / "alpha-0") == content(base)
    assert content(tmp_path / "out" / "alpha-1") == content(tuned)
    types = [load(tmp_path / "out" / f"alpha-{alpha}").dtype for alpha in ("0", "0.5", "1")]
    assert types == [torch.bfloat16, torch.float32, torch.float32]


def test_w06_counters_are_not_interpolated(
    base: Path, tuned: Path, edited: Any, tensors: Tensors, tmp_path: Path
) -> None:
    folders = [edited(f, {"bert.counter": torch.tensor(n)}) for n, f in ((3, base), (4, tuned))]
    walk(*folders, [0.5], tmp_path / "out")
    counter = tensors(tmp_path / "out")["bert.counter"]
    assert (counter.dtype, counter.item()) == (torch.int64, 3)


def test_checkpoint_of_a_run_and_its_base(
    checkpoint: Path, bert_folder: Path, content: Any, tensors: Tensors, load: Any, tmp_path: Path
) -> None:
    walk(bert_folder, checkpoint, [0.0, 1.0], tmp_path / "out")
    assert content(tmp_path / "out" / "alpha-0") == content(bert_folder)
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    tuned = tensors(tmp_path / "out" / "alpha-1")
    assert all(torch.equal(tensor, state[f"backbone.model.{name}"]) for name, tensor in tuned.items())
    load(tmp_path / "out" / "alpha-1")


def test_recipe(base: Path, tuned: Path, tmp_path: Path) -> None:
    text = walk(base, tuned, [0.25, 0.5], tmp_path / "out", "0:1, 2:")
    recipe = json.loads((tmp_path / "out" / "alpha-0.25" / "recipe.json").read_text())
    assert {key: recipe[key] for key in ("operation", "layers", "alpha")} == {
        "operation": "interpolate", "layers": ["0:1", "2:"], "alpha": 0.25,
    }  # fmt: skip
    assert [entry["source"] for entry in recipe["inputs"]] == [str(base), str(tuned)]
    assert f'from_pretrained("{tmp_path}/out/alpha-0.5")' in text


@pytest.mark.parametrize(
    ("alpha", "layers", "message"),
    [
        ([], None, r"alpha must be at least one number, each once, got \[\]"),
        ([0.5, 0.5], None, r"alpha must be at least one number, each once, got \[0.5, 0.5\]"),
        ([0.5], "5:7", "layers must lie within the model's 3 layers"),
    ],
)
def test_mistakes(
    base: Path, tuned: Path, tmp_path: Path, alpha: list[float], layers: str | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        walk(base, tuned, alpha, tmp_path / "out", layers)
    assert list(tmp_path.iterdir()) == []
