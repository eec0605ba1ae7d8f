"""Distances from a base, against their definitions in float64 numpy."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lit_encoders.weights import combine
from lit_encoders.weights.checkpoint import open_weights
from lit_encoders.weights.drift import Drift, drift, drift_verb, file_products, products, sum_products

Tensors = Callable[[Path], dict[str, Tensor]]
Rows = dict[tuple[str, str, str, str], float]


def definition(base: np.ndarray[Any, Any], tuned: np.ndarray[Any, Any]) -> tuple[float, float, float]:
    b, w = base.astype(np.float64), tuned.astype(np.float64)
    d = w - b
    norms = np.linalg.norm(b), np.linalg.norm(w)
    return np.linalg.norm(d) / norms[0], b @ w / (norms[0] * norms[1]), math.sqrt(float(np.mean(d * d)))


def flat(state: dict[str, Tensor], prefix: str = "") -> np.ndarray[Any, Any]:
    return np.concatenate([tensor.double().numpy().reshape(-1) for n, tensor in state.items() if n.startswith(prefix)])


def values(found: Drift) -> tuple[float, float, float]:
    return found.relative_l2, found.cosine, found.rms


def read_csv(path: Path) -> Rows:
    with path.open(newline="") as file:
        return {
            (row["range"], row["model"], row["other"], row["measure"]): float(row["value"])
            for row in csv.DictReader(file)
        }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("distance", [1.0, 1e-2])
def test_drift_is_its_definition(dtype: torch.dtype, distance: float) -> None:
    torch.manual_seed(0)
    base = {name: torch.randn(shape).to(dtype) for name, shape in (("a", (50, 70)), ("b", (300,)), ("c", ()))}
    tuned = {name: (tensor.double() + distance * torch.randn(tensor.shape)).to(dtype) for name, tensor in base.items()}
    assert values(drift(base, tuned)) == pytest.approx(definition(flat(base), flat(tuned)), rel=1e-12)


def test_small_distances_of_large_weights_are_not_lost() -> None:
    """In float32 the distance would be rounding."""
    base = torch.full((1000,), 1000.0)
    tuned = torch.nextafter(base, torch.tensor(2000.0))
    assert values(drift({"w": base}, {"w": tuned})) == pytest.approx(definition(base.numpy(), tuned.numpy()), rel=1e-12)


def test_long_tensors_are_summed_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    from lit_encoders.weights import drift as module

    torch.manual_seed(0)
    base, tuned = torch.randn(2, 1000)
    whole = products(base, tuned)
    monkeypatch.setattr(module, "_LIVE_BLOCK", 64)
    torch.testing.assert_close(products(base, tuned).gram, whole.gram, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("base", "tuned", "expected"),
    [
        ([3.0, 4.0], [3.0, 4.0], (0.0, 1.0, 0.0)),
        ([3.0, 4.0], [6.0, 8.0], (1.0, 1.0, math.sqrt(12.5))),
        ([3.0, 4.0], [-3.0, -4.0], (2.0, -1.0, math.sqrt(50))),
        ([3.0, 4.0], [0.0, 0.0], (1.0, 0.0, math.sqrt(12.5))),
        ([0.0, 0.0], [3.0, 4.0], (math.inf, 0.0, math.sqrt(12.5))),
        ([0.0, 0.0], [0.0, 0.0], (0.0, 1.0, 0.0)),
        ([], [], (0.0, 1.0, 0.0)),
    ],
)
def test_closed_forms(base: list[float], tuned: list[float], expected: tuple[float, ...]) -> None:
    found = drift({"w": torch.tensor(base)}, {"w": torch.tensor(tuned)})
    assert values(found) == pytest.approx(expected, abs=1e-12)


def test_w06_integers_have_no_distance() -> None:
    base = {"w": torch.tensor([3.0, 4.0]), "counter": torch.tensor(3), "mask": torch.tensor([True])}
    tuned = {"w": torch.tensor([3.0, 4.5]), "counter": torch.tensor(9), "mask": torch.tensor([False])}
    assert drift(base, tuned) == drift({"w": base["w"]}, {"w": tuned["w"]})


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1.0, 0.0], [0.0, 2.0], 0.0),
        ([1.0, 1.0], [3.0, 3.0], 1.0),
        ([1.0, 1.0], [-1.0, -1.0], -1.0),
        ([1.0, 0.0], [1.0, 1.0], math.sqrt(0.5)),
        ([0.0, 0.0], [0.0, 0.0], 1.0),
        ([0.0, 0.0], [1.0, 0.0], 0.0),
    ],
)
def test_agreement_of_task_vectors(first: list[float], second: list[float], expected: float) -> None:
    base = torch.tensor([5.0, -7.0], dtype=torch.float64)
    found = products(base, base + torch.tensor(first), base + torch.tensor(second))
    assert found.agreement(1, 2) == pytest.approx(expected, abs=1e-12)
    assert found.agreement(2, 1) == found.agreement(1, 2)


def test_sums_are_those_of_everything_together() -> None:
    torch.manual_seed(0)
    base, tuned = torch.randn(2, 3, 40)
    added = sum_products(products(b, t) for b, t in zip(base, tuned, strict=True))
    assert values(added.drift()) == pytest.approx(values(products(base, tuned).drift()), rel=1e-12)
    assert added.numel == 120


def test_files_as_live_tensors(
    base: Path, tuned: Path, make_model: Any, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(combine, "BLOCK", 300)
    folders = [tuned, make_model(seed=6, dtype=torch.bfloat16)]
    first, *others = [open_weights(str(folder), "models") for folder in (base, *folders)]
    found = file_products(first, others)
    for number, folder in enumerate(folders):
        got = sum_products(found.values(), 2).drift(number + 1)
        assert values(got) == pytest.approx(definition(flat(tensors(base)), flat(tensors(folder))), rel=1e-12)


def test_csv_and_picture(base: Path, tuned: Path, make_model: Any, tensors: Tensors, tmp_path: Path) -> None:
    third = make_model(seed=6)
    models = [str(folder) for folder in (base, tuned, third)]
    text = drift_verb(models, "0:2, head", tmp_path / "out")
    rows = read_csv(tmp_path / "out" / "drift.csv")
    ranges = ["embeddings", "0:1", "1:2", "2:3", "head", "0:2", "everything"]
    assert list(dict.fromkeys(key[0] for key in rows)) == ranges
    assert len(rows) == len(ranges) * (2 * 3 + 1)
    prefixes = {"embeddings": "bert.embeddings.", "1:2": "bert.encoder.layer.1.", "head": "cls.", "everything": ""}
    b = tensors(base)
    for label, prefix in prefixes.items():
        start, ends = flat(b, prefix), [flat(tensors(folder), prefix) for folder in (tuned, third)]
        for model, end in zip(models[1:], ends, strict=True):
            got = [rows[label, model, "", measure] for measure in ("relative_l2", "cosine", "rms")]
            assert got == pytest.approx(definition(start, end), rel=1e-12)
        one, two = (end - start for end in ends)
        cosine = one @ two / (np.linalg.norm(one) * np.linalg.norm(two))
        assert rows[label, models[1], models[2], "task_vector_cosine"] == pytest.approx(cosine, abs=1e-12)
    both = np.concatenate([flat(tensors(tuned), f"bert.encoder.layer.{n}.") for n in (0, 1)])
    start = np.concatenate([flat(b, f"bert.encoder.layer.{n}.") for n in (0, 1)])
    assert rows["0:2", models[1], "", "relative_l2"] == pytest.approx(definition(start, both)[0], rel=1e-12)
    assert (tmp_path / "out" / "drift.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"drift.csv", "drift.png"}
    for part in ("relative L2 2", "cosine 1~2", "everything", f"2 = {third}", f"{tmp_path}/out/drift.csv"):
        assert part in text


def test_model_against_itself(base: Path, tmp_path: Path) -> None:
    drift_verb([str(base)] * 3, None, tmp_path / "out")
    for (_, _, _, measure), value in read_csv(tmp_path / "out" / "drift.csv").items():
        assert value == {"relative_l2": 0, "cosine": 1, "rms": 0, "task_vector_cosine": 1}[measure]


def test_w04_what_not_all_have_is_left_out_and_listed(
    base: Path, make_model: Any, tensors: Tensors, tmp_path: Path
) -> None:
    encoder = make_model(seed=9, architecture="BertModel", with_tokenizer=False)
    text = drift_verb([str(base), str(encoder)], "0:1", tmp_path / "out")
    rows = read_csv(tmp_path / "out" / "drift.csv")
    shared = {f"bert.{name}": tensor for name, tensor in tensors(encoder).items() if not name.startswith("pooler")}
    start = flat({name: tensors(base)[name] for name in shared})
    assert rows["everything", str(encoder), "", "relative_l2"] == pytest.approx(definition(start, flat(shared))[0])
    assert ("head", str(encoder), "", "rms") not in rows
    assert "Left out, since not every model has them: 5 tensors: cls.predictions.bias, " in text


def test_checkpoint_of_a_run(checkpoint: Path, bert_folder: Path, tmp_path: Path) -> None:
    drift_verb([str(bert_folder), str(checkpoint)], None, tmp_path / "out")
    assert read_csv(tmp_path / "out" / "drift.csv")["everything", str(checkpoint), "", "relative_l2"] > 0


@pytest.mark.parametrize(
    ("count", "layers", "message"),
    [
        (1, None, "models must be a base and at least one trained from it, got 1"),
        (2, "3:5", "layers must lie within the model's 3 layers"),
        (2, "final_norm", "layers must match something that the model has"),
        (2, "x", "layers must be like '0:8'"),
    ],
)
def test_mistakes_come_before_the_reading(
    base: Path, tmp_path: Path, count: int, layers: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lit_encoders.weights.drift.file_products", None)
    with pytest.raises(ValueError, match=message):
        drift_verb([str(base)] * count, layers, tmp_path / "out")
    with pytest.raises(ValueError, match="output must be a folder that does not exist yet"):
        drift_verb([str(base)] * 2, None, tmp_path)
    assert list(tmp_path.iterdir()) == []
