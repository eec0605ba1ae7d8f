"""RepresentationCKA: its distances are those of exported models, it disturbs nothing, and it survives a resume."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from lit_encoders import LitMLM, TextDataModule
from lit_encoders.analysis.cka import FORMS, linear_cka
from lit_encoders.callbacks import CLMDetour, ExactResume, HFExport, RepresentationCKA
from lit_encoders.evaluation.embeddings import embed_layers
from lit_encoders.evaluation.texts import first_texts
from lit_encoders.modules.open_module import open_module

MakeTrainer = Callable[..., Trainer]


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


def read(path: Path) -> dict[tuple[int, int], float]:
    with path.open() as file:
        return {(int(r["step"]), int(r["layer"])): float(r["distance"]) for r in csv.DictReader(file)}


@pytest.mark.parametrize("form", ["plain", "debiased, standardised"])
def test_distances_are_those_of_the_exported_model(
    fit: Any, bert_folder: Path, text_file: Path, tmp_path: Path, form: str
) -> None:
    probe = RepresentationCKA(str(text_file), num_texts=20, every_n_steps=2, form=form, sequence_length=40)
    # Causal at the end: texts are read in both directions all the same.
    fit(CLMDetour(steps=3, decay_share=0), probe, HFExport())
    texts = first_texts(str(text_file), 20, "text", asked_by="num_texts")
    before, after = (
        embed_layers(open_module(str(folder)), texts, sequence_length=40)
        for folder in (bert_folder, tmp_path / "run" / "export")
    )
    found = read(tmp_path / "run" / "cka.csv")
    assert set(found) == {(step, layer) for step in (2, 3) for layer in range(3)}
    for layer in range(3):
        expected = 1 - linear_cka(before[layer], after[layer], FORMS[form])
        assert found[3, layer] == pytest.approx(expected, abs=1e-6)
    assert found[3, 2] > 1e-3
    assert (tmp_path / "run" / "cka.png").read_bytes().startswith(b"\x89PNG")
    assert not list((tmp_path / "run").glob(".*"))


def test_a_run_ends_with_the_same_weights_beside_it(fit: Any, text_file: Path) -> None:
    alone = fit(CLMDetour(steps=4, decay_share=0.5))
    watched = fit(CLMDetour(steps=4, decay_share=0.5), RepresentationCKA(str(text_file), num_texts=8, every_n_steps=1))
    for one, other in zip(alone.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_log_has_each_figure_once_at_its_step(fit: Any, text_file: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path, name="logs", version="")
    probe = RepresentationCKA(str(text_file), num_texts=8, every_n_steps=3)
    fit(CLMDetour(steps=7, decay_share=0), probe, logger=logger)
    events = EventAccumulator(str(tmp_path / "logs")).Reload()
    assert [scalar.step for scalar in events.Scalars("cka/0")] == [3, 6, 7]
    assert [image.step for image in events.Images("cka")] == [3, 6, 7]


def test_a_resumed_run_measures_from_the_same_start(fit: Any, text_file: Path, tmp_path: Path) -> None:
    def probe(**settings: Any) -> RepresentationCKA:
        return RepresentationCKA(str(text_file), **{"num_texts": 8, "every_n_steps": 1, **settings})

    kept: dict[str, Any] = {"enable_checkpointing": True}
    fit(CLMDetour(steps=4, decay_share=0), probe(), ExactResume(every_n_steps=2), **kept)
    whole = (tmp_path / "run" / "cka.csv").read_text()
    ckpt = tmp_path / "run" / "checkpoints" / "step-00000002.ckpt"
    assert torch.load(ckpt, weights_only=True)["callbacks"]["RepresentationCKA"]["start"].shape == (3, 8, 8)
    fit(CLMDetour(steps=4, decay_share=0), probe(), ExactResume(), ckpt=ckpt, folder="again", **kept)
    assert (tmp_path / "again" / "cka.csv").read_text() == whole
    for other in ({"num_texts": 9}, {"form": "plain"}):
        with pytest.raises(ValueError, match="must be those that the run began with: CKA compares the same texts"):
            fit(CLMDetour(steps=4, decay_share=0), probe(**other), ExactResume(), ckpt=ckpt, folder="other", **kept)


def test_what_cannot_be(fit: Any, text_file: Path, stack: Any, make_trainer: MakeTrainer) -> None:
    for settings, message in (
        ({"every_n_steps": 0}, "RepresentationCKA.every_n_steps must be at least 1, got 0"),
        ({"num_texts": 3}, "RepresentationCKA.num_texts must be at least 4, got 3"),
        ({"form": "round"}, "RepresentationCKA.form must be one of plain; .*, got 'round'"),
    ):
        with pytest.raises(ValueError, match=message):
            RepresentationCKA(str(text_file), **settings)
    with pytest.raises(ValueError, match=r"5000 texts \(RepresentationCKA.num_texts\), got 200"):
        fit(RepresentationCKA(str(text_file), num_texts=5000))
    with pytest.raises(ValueError, match="sequence_length must be at most the model's 128, got 129"):
        fit(RepresentationCKA(str(text_file), num_texts=5, sequence_length=129))
    with pytest.raises(TypeError, match="RepresentationCKA needs a LitEncoder, got Stack"):
        make_trainer(max_steps=1, callbacks=[RepresentationCKA(str(text_file), num_texts=5)]).fit(
            stack(), torch.utils.data.DataLoader(torch.ones(2))
        )
