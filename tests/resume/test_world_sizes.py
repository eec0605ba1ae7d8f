"""One run through other numbers of processes: saved by one kind, gone on with by the next, equal to one left alone."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lit_encoders.resume.store import newest_checkpoint
from lit_encoders.weights.checkpoint import open_weights
from lit_encoders.weights.export import export_checkpoint
from lit_encoders.weights.sharded import is_sharded, read_sharded

# What they start together takes long: on one worker, once.
pytestmark = pytest.mark.xdist_group("world_sizes")

# Micro-batches x ranks is 2 in each of them.
KINDS = {
    "one": ["--trainer.accumulate_grad_batches=2"],
    "ddp": ["--trainer.accumulate_grad_batches=1", "--trainer.devices=2", "--trainer.strategy=ddp"],
    "fsdp2": ["--trainer.accumulate_grad_batches=1", "--trainer.devices=2", "--trainer.strategy=fsdp2"],
}
# Steps after which each is stopped; the last goes on to the end, at 60.
CHAIN = (("one", 6), ("ddp", 20), ("fsdp2", 42), ("one", None))


@pytest.fixture(scope="module")
def kills() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kills", Path(__file__).with_name("kills.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fit(config: Path, root: Path, kind: str, stop: int | None, kills: ModuleType) -> str:
    """Type the command, and ask the run to stop once it has made some steps; give what it said."""
    command = [sys.executable, "-W", "ignore", "-m", "lit_encoders", "fit", "--config", str(config)]
    command += [f"--trainer.default_root_dir={root}", *KINDS[kind]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    log = root.with_suffix(f".{kind}-{stop}.log")
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
        while stop is not None and process.poll() is None and kills.newest_step(root) < stop:
            time.sleep(0.01)
        if stop is not None:
            process.send_signal(signal.SIGTERM)
        code = process.wait()
    said = log.read_text()
    assert code == (0 if stop is None else 75), said[-3000:]
    return said


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, kills: ModuleType) -> dict[str, Any]:
    """A run left alone, and one that goes through the chain; the sharded checkpoint on the way."""
    folder = tmp_path_factory.mktemp("ranks")
    config = kills.write_config(folder, "map-0")
    settings = json.loads(config.read_text())
    model = folder / "model" / "config.json"
    # Dropout is drawn anew for each rank: without it the arithmetic is the same on any number of them.
    model.write_text(
        json.dumps({**json.loads(model.read_text()), "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})
    )
    config.write_text(json.dumps(settings))
    whole, chained = folder / "whole", folder / "chained"
    fit(config, whole, "one", None, kills)
    said = {}
    for kind, stop in CHAIN:
        said[kind, stop] = fit(config, chained, kind, stop, kills)
        if kind == "fsdp2":
            found = newest_checkpoint(chained / "checkpoints")
            assert found is not None
            found.path.rename(folder / "sharded.ckpt")
            (folder / "sharded.ckpt").rename(found.path)
            export_checkpoint(found.path, folder / "sharded-export")
            export_checkpoint(found.path, folder / "whole-export", dtype="float32")
            sharded = read_sharded(found.path)
            weights = {name: tensor.load() for name, tensor in open_weights(str(found.path), "model").tensors.items()}
            facts = {"is_sharded": is_sharded(found.path), "names": set(sharded), "weights": weights}
    return {"folder": folder, "said": said, **facts}


def test_a_run_through_other_numbers_of_processes(runs: dict[str, Any]) -> None:
    """Saved at 1 and gone on with at 2, DDP to FSDP2, FSDP2 to one process; stopped by a signal to one of the ranks."""
    ours, theirs = (load_file(runs["folder"] / name / "export" / "model.safetensors") for name in ("chained", "whole"))
    assert set(ours) == set(theirs)
    assert max((ours[name] - theirs[name]).abs().max().item() for name in ours) < 1e-6
    tables = [json.loads((runs["folder"] / name / "summary.json").read_text()) for name in ("chained", "whole")]
    assert [table["tokens"] for table in tables] == [tables[0]["tokens"]] * 2
    for first, second in zip(*(table["phases"] for table in tables), strict=True):
        for name, pair in first["losses"].items():
            assert pair == pytest.approx(second["losses"][name], abs=1e-5), name
    for kind, stop in CHAIN[:-1]:
        assert "stopped by SIGTERM after step" in runs["said"][kind, stop]


def test_a_sharded_checkpoint_is_read_like_a_file(runs: dict[str, Any]) -> None:
    """Piece by piece by the weight verbs and the export, and as a whole: the same tensors."""
    assert runs["is_sharded"]
    streamed, whole = (
        load_file(runs["folder"] / name / "model.safetensors") for name in ("sharded-export", "whole-export")
    )
    assert set(streamed) == set(whole) == set(runs["weights"])
    for name, tensor in whole.items():
        assert torch.equal(streamed[name], tensor), name
        assert torch.equal(runs["weights"][name], tensor), name
