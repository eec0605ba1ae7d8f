"""DownstreamProbe: figures as of scikit-learn on the exported model; it disturbs nothing and survives a resume."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from lit_encoders import LitMLM, TextDataModule
from lit_encoders.callbacks import CLMDetour, DownstreamProbe, ExactResume, HFExport
from lit_encoders.evaluation.embeddings import embed
from lit_encoders.modules.open_module import open_module

MakeTrainer = Callable[..., Trainer]


def labelled(path: Path, count: int, seed: int, labels: str = "abc") -> Path:
    """Texts whose class is told by half of their words."""
    draw = random.Random(seed)
    lines = []
    for _ in range(count):
        label = draw.choice(labels)
        words = [f"w{draw.randrange(90)}" for _ in range(6)]
        words += [f"w{30 * 'abcd'.index(label) % 90 + draw.randrange(30)}" for _ in range(2)]
        lines.append(json.dumps({"text": " ".join(words), "label": label}))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def sets(tmp_path: Path) -> dict[str, str]:
    return {
        "train": str(labelled(tmp_path / "train.jsonl", 90, 0)),
        "test": str(labelled(tmp_path / "test.jsonl", 60, 1)),
    }


@pytest.fixture
def fit(bert_folder: Path, text_file: Path, make_trainer: MakeTrainer, tmp_path: Path) -> Any:
    def run(*callbacks: Callback, ckpt: Path | None = None, folder: str = "run", **settings: Any) -> LitMLM:
        module = LitMLM(str(bert_folder), learning_rate=1e-2)
        data = TextDataModule(str(text_file), sequence_length=48, slots=96, val_share=0.1)
        given = {"default_root_dir": tmp_path / folder, "limit_val_batches": 0}
        trainer = make_trainer(callbacks=[*callbacks], **{**given, **settings})
        trainer.fit(module, data, ckpt_path=ckpt)
        return module

    return run


def read(path: Path) -> dict[int, tuple[float, float]]:
    with path.open() as file:
        return {int(row["step"]): (float(row["accuracy"]), float(row["macro_f1"])) for row in csv.DictReader(file)}


def by_scikit_learn(folder: Path, sets: dict[str, str]) -> tuple[float, float]:
    items = {name: [json.loads(line) for line in Path(path).read_text().splitlines()] for name, path in sets.items()}
    module = open_module(str(folder))
    vectors = {
        name: embed(module, [item["text"] for item in every], sequence_length=128).numpy()
        for name, every in items.items()
    }
    gold = {name: [item["label"] for item in every] for name, every in items.items()}
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)).fit(vectors["train"], gold["train"])
    said = model.predict(vectors["test"])
    return float((said == gold["test"]).mean()), float(f1_score(gold["test"], said, average="macro"))


def test_figures_are_those_of_the_exported_model(
    fit: Any, sets: dict[str, str], bert_folder: Path, tmp_path: Path
) -> None:
    # Causal at the end: texts are read in both directions all the same.
    fit(CLMDetour(steps=3, decay_share=0), DownstreamProbe(**sets, every_n_steps=2), HFExport())
    found = read(tmp_path / "run" / "probe-probe.csv")
    assert list(found) == [0, 2, 3]
    assert found[0] == pytest.approx(by_scikit_learn(bert_folder, sets), abs=1e-9)
    assert found[3] == pytest.approx(by_scikit_learn(tmp_path / "run" / "export", sets), abs=1e-9)
    assert 1 / 3 < found[0][0] < 1


def test_a_run_ends_with_the_same_weights_beside_it(fit: Any, sets: dict[str, str]) -> None:
    alone = fit(CLMDetour(steps=4, decay_share=0.5))
    watched = fit(CLMDetour(steps=4, decay_share=0.5), DownstreamProbe(**sets, every_n_steps=1))
    for one, other in zip(alone.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, other)


def test_two_probes_are_logged_at_their_steps(fit: Any, sets: dict[str, str], tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path, name="logs", version="")
    probes = [DownstreamProbe(**sets, every_n_steps=3), DownstreamProbe(sets["train"], name="own", every_n_steps=5)]
    fit(CLMDetour(steps=5, decay_share=0), *probes, logger=logger)
    events = EventAccumulator(str(tmp_path / "logs")).Reload()
    assert [scalar.step for scalar in events.Scalars("probe/probe/accuracy")] == [0, 3, 5]
    assert [scalar.step for scalar in events.Scalars("probe/own/macro_f1")] == [0, 5]
    assert len(events.Scalars("tokens/probe/own/macro_f1")) == 2


def test_a_resumed_run_goes_on_with_its_history(fit: Any, sets: dict[str, str], tmp_path: Path) -> None:
    kept: dict[str, Any] = {"enable_checkpointing": True}
    fit(CLMDetour(steps=4, decay_share=0), DownstreamProbe(**sets, every_n_steps=1), ExactResume(2), **kept)
    whole = read(tmp_path / "run" / "probe-probe.csv")
    ckpt = tmp_path / "run" / "checkpoints" / "step-00000002.ckpt"
    again = DownstreamProbe(**sets, every_n_steps=1)
    fit(CLMDetour(steps=4, decay_share=0), again, ExactResume(), ckpt=ckpt, folder="again", **kept)
    assert read(tmp_path / "again" / "probe-probe.csv") == whole


def test_what_cannot_be(fit: Any, sets: dict[str, str], stack: Any, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    for settings, message in (
        ({"every_n_steps": 0}, "DownstreamProbe.every_n_steps must be at least 1, got 0"),
        ({"limit": 0}, "DownstreamProbe.limit must be at least 1, got 0"),
        ({"name": "a/b"}, "DownstreamProbe.name must be usable as a file name, got 'a/b'"),
    ):
        with pytest.raises(ValueError, match=message):
            DownstreamProbe(**sets, **settings)
    other = str(labelled(tmp_path / "other.jsonl", 40, 2, labels="abcd"))
    for probe, message in (
        (DownstreamProbe(sets["train"], other), "DownstreamProbe.test must have only labels .*, got 'd'"),
        (DownstreamProbe(sets["train"], label="class"), r"must have the column 'class' \(DownstreamProbe.label\)"),
        (DownstreamProbe("no.jsonl"), "DownstreamProbe.train must name files that exist, got 'no.jsonl'"),
        (DownstreamProbe("hpo_synonyms"), "must be a task of classification, got the preset 'hpo_synonyms'"),
        (DownstreamProbe(**sets, sequence_length=129), "sequence_length must be at most the model's 128, got 129"),
    ):
        with pytest.raises(ValueError, match=message):
            fit(probe)
    with pytest.raises(ValueError, match=r"DownstreamProbe.name must differ between probes, got 'probe' twice"):
        fit(DownstreamProbe(**sets), DownstreamProbe(other))
    with pytest.raises(TypeError, match="DownstreamProbe needs a LitEncoder, got Stack"):
        make_trainer(max_steps=1, callbacks=[DownstreamProbe(**sets)]).fit(
            stack(), torch.utils.data.DataLoader(torch.ones(2))
        )
