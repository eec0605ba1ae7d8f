"""WeightDrift: distances against numpy in float64, in a table, a picture and the log, also over a resume."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from lit_encoders import LitMLM, TextDataModule
from lit_encoders.callbacks import LayerFreezing, WeightDrift

Run = Callable[..., Trainer]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def by_numpy(start: dict[str, torch.Tensor], now: dict[str, torch.Tensor], *prefixes: str) -> dict[str, float]:
    """The three measures of all tensors with these prefixes, concatenated."""
    names = [name for name in start if name.startswith(prefixes)]
    base, tuned = (np.concatenate([x[n].double().numpy().ravel() for n in names]) for x in (start, now))
    return {
        "relative_l2": np.linalg.norm(tuned - base) / np.linalg.norm(base),
        "cosine": base @ tuned / np.linalg.norm(base) / np.linalg.norm(tuned),
        "rms": math.sqrt(np.mean((tuned - base) ** 2)),
    }


PLACES = {"embeddings": ("embed",), "0:1": ("blocks.0",), "1:2": ("blocks.1",), "2:3": ("blocks.2",),
          "head": ("head",), "0:2": ("blocks.0", "blocks.1"), "everything": ("",)}  # fmt: skip


def read(path: Path) -> dict[tuple[int, str, str], float]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = {(int(row["step"]), row["range"], row["measure"]): float(row["value"]) for row in rows}
    assert len(found) == len(rows), "each once"
    return found


@pytest.mark.parametrize("accumulate", [1, 2])
def test_measures_against_numpy(run: Run, stack: Any, seen: Any, tmp_path: Path, accumulate: int) -> None:
    """Every two optimizer steps, and at the end."""
    drift = WeightDrift(["0:2"], every_n_steps=2)
    run(stack(adam), [1.0, -0.5] * 5, drift, seen, accumulate_grad_batches=accumulate, max_steps=5)
    found = read(tmp_path / "drift.csv")
    assert {step for step, _, _ in found} == {2, 4, 5}
    assert {place for _, place, _ in found} == set(PLACES)
    for (step, place, measure), value in found.items():
        wanted = by_numpy(seen.start, seen.weights[step - 1], *PLACES[place])[measure]
        assert value == pytest.approx(wanted, rel=1e-9, abs=1e-12), (step, place, measure)
    # What is logged is of the last measured step within the run.
    logged = seen.logged[-1]
    assert {name for name in logged if name.startswith("drift/")} == {
        f"drift/{place}/{measure}" for place in ("0:2", "everything") for measure in ("relative_l2", "cosine", "rms")
    }
    assert logged["drift/0:2/relative_l2"] == pytest.approx(found[4, "0:2", "relative_l2"], rel=1e-6)
    assert (tmp_path / "drift.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob(".*"))


def test_what_stands_still_has_no_distance(run: Run, stack: Any, tmp_path: Path) -> None:
    run(stack(adam), [1.0, 1.0], LayerFreezing("0:1"), WeightDrift("0:1, head"))
    found = read(tmp_path / "drift.csv")
    assert [found[2, "0:1", m] for m in ("relative_l2", "cosine", "rms")] == [0.0, 1.0, 0.0]
    assert found[2, "head", "relative_l2"] > 0


def test_the_history_survives_a_resume(run: Run, stack: Any, seen: Any, tmp_path: Path) -> None:
    values = [1.0] * 4
    settings: dict[str, Any] = {"max_steps": 4, "max_epochs": -1}
    run(stack(adam), values, WeightDrift(every_n_steps=1), **settings)
    whole = (tmp_path / "drift.csv").read_text()
    trainer = run(stack(adam), values, WeightDrift(every_n_steps=1), max_steps=2, max_epochs=-1)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    states = torch.load(tmp_path / "two.ckpt", weights_only=True)["callbacks"]
    assert [set(state["history"]) for state in states.values()] == [{1, 2}]
    (tmp_path / "drift.csv").unlink()
    run(stack(adam), values, WeightDrift(every_n_steps=1), ckpt=tmp_path / "two.ckpt", **settings)
    assert (tmp_path / "drift.csv").read_text() == whole
    with pytest.raises(ValueError, match=r"WeightDrift.base must be the checkpoint's"):
        run(stack(adam, seed=1), values, WeightDrift(), ckpt=tmp_path / "two.ckpt", **settings)


def test_a_second_run_has_a_history_of_its_own(run: Run, stack: Any, tmp_path: Path) -> None:
    module, drift = stack(adam), WeightDrift(every_n_steps=1)
    run(module, [1.0] * 3, drift)
    run(module, [1.0] * 2, drift)
    assert set(drift.history) == {1, 2}


def test_from_a_base_folder_with_a_picture_in_tensorboard(
    bert_folder: Path, text_file: Path, make_trainer: Callable[..., Trainer], seen: Any, tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    data = TextDataModule(str(text_file), sequence_length=48, slots=96, val_share=0.1)
    logger = TensorBoardLogger(tmp_path, name="logs", version="")
    drift = WeightDrift("0:2", every_n_steps=2, base=str(bert_folder))
    trainer = make_trainer(max_steps=3, callbacks=[drift, seen], limit_val_batches=0, logger=logger)
    trainer.fit(LitMLM(str(bert_folder), learning_rate=1e-2), data)
    events = EventAccumulator(str(tmp_path / "logs")).Reload()
    assert [image.step for image in events.Images("drift")] == [2, 3]
    assert events.Scalars("drift/0:2/rms")[0].value > 0
    layers = [f"backbone.model.bert.encoder.layer.{number}" for number in (0, 1)]
    found = read(tmp_path / "drift.csv")
    for measure, value in by_numpy(seen.start, seen.weights[2], *layers).items():
        assert found[3, "0:2", measure] == pytest.approx(value, rel=1e-9)


def test_what_cannot_be(run: Run, stack: Any) -> None:
    with pytest.raises(ValueError, match=r"WeightDrift.every_n_steps must be at least 1, got 0"):
        WeightDrift(every_n_steps=0)
    with pytest.raises(ValueError, match="must lie within the model's 3 layers"):
        run(stack(), [1.0], WeightDrift("0:9"))
    with pytest.raises(ValueError, match=r"WeightDrift must stand once .*, got 2"):
        run(stack(), [1.0], WeightDrift("0:1"), WeightDrift("1:2"))
