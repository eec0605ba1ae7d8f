"""Tasks out of settings, and toy tasks that a tiny model learns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_encoders.evaluation.embeddings import embed
from lit_encoders.evaluation.finetuning import FineTuning
from lit_encoders.evaluation.items import Collection, LabelledText, Query, TaggedWords
from lit_encoders.evaluation.linear_probes import fit_classifier
from lit_encoders.evaluation.ranking import ranking_scores
from lit_encoders.evaluation.tagging_task import predict_tags
from lit_encoders.evaluation.tasks import KINDS, Classification, Perplexity, Retrieval, Tagging, make_task, override
from lit_encoders.modules.open_module import open_module

LEARN = FineTuning(epochs=5, batch=8, learning_rate=5e-3, sequence_length=32)
Draw = Callable[[int, int], Any]


@pytest.fixture
def labelled(labelled_records: Draw) -> Draw:
    return lambda count, seed: [LabelledText(*record.values()) for record in labelled_records(count, seed)]


@pytest.fixture
def tagged(tagged_records: Draw) -> Draw:
    return lambda count, seed: [TaggedWords(*map(tuple, record.values())) for record in tagged_records(count, seed)]


@pytest.fixture
def pairs(pair_records: Draw) -> Draw:
    def draw(count: int, seed: int) -> Collection:
        records = pair_records(count, seed)
        documents = {f"d{place}": record["document"] for place, record in enumerate(records)}
        return Collection(documents, [Query(f"q{p}", r["query"], {f"d{p}": 1.0}) for p, r in enumerate(records)])

    return draw


# Learning


def test_classes_are_learnt(bert_folder: Path, labelled: Draw) -> None:
    task = Classification("toy", read=lambda: (labelled(64, 0), labelled(60, 1)), fine_tuning=LEARN)
    items = task.load()
    scores = task.run(str(bert_folder), items, 0)
    assert scores.value("accuracy") == scores.value("macro_f1") == 1.0
    assert set(scores.metrics) == {"accuracy", "macro_f1", "f1/high", "f1/low"}


def test_probe_is_logistic_regression_on_resting_embeddings(bert_folder: Path, labelled: Draw) -> None:
    task = Classification("toy", mode="probe", read=lambda: (labelled(64, 0), labelled(60, 1)), fine_tuning=LEARN)
    items = task.load()
    scores = task.run(str(bert_folder), items, 0)
    module = open_module(str(bert_folder))
    vectors = [embed(module, [item.text for item in side], sequence_length=32) for side in (items.train, items.test)]
    probe = fit_classifier(vectors[0], [item.label for item in items.train])
    assert scores.value("accuracy") == probe.score(vectors[1].numpy(), [item.label for item in items.test])
    assert not task.is_seeded


def test_spans_are_learnt(bert_folder: Path, tagged: Draw) -> None:
    task = Tagging("toy", read=lambda: (tagged(60, 0), tagged(40, 1)), fine_tuning=LEARN)
    items = task.load()
    scores = task.run(str(bert_folder), items, 0)
    assert scores.value("span_f1") > 0.9
    assert set(scores.metrics) == {"span_f1", "macro_f1", "f1/X", "f1/Y"}


def test_words_cut_off_are_missed(bert_folder: Path) -> None:
    """Whatever the head says: here all it ever says is the beginning of a span."""
    module = open_module(str(bert_folder))
    head = torch.nn.Linear(32, 2)
    torch.nn.init.zeros_(head.weight)
    head.bias.data = torch.tensor([1.0, 0.0])
    items = [
        TaggedWords(("w1",) * 6, ("B",) * 6),
        TaggedWords(("w1", "", "w2"), ("B",) * 3),
        TaggedWords(("w3",), ("B",)),
    ]
    found = predict_tags(module, head, items, ["B", "O"], 5, "O")
    # Five tokens, two of them special ones; the word without a letter has no piece.
    assert found == [["B", "B", "B", "O", "O", "O"], ["B", "O", "B"], ["B"]]


def test_parts_of_speech_are_words(bert_folder: Path, tagged: Draw) -> None:
    sentences = [TaggedWords(item.words, tuple(tag[0].lower() for tag in item.tags)) for item in tagged(64, 0)]
    task = Tagging(
        "toy", scheme="words", read=lambda: (sentences, sentences), fine_tuning=replace(LEARN, sequence_length=6)
    )
    scores = task.run(str(bert_folder), task.load(), 0)
    # Four words of each sentence are read at all.
    reach = sum(min(4, len(item.words)) for item in sentences) / sum(len(item.words) for item in sentences)
    assert 0.5 < scores.value("accuracy") <= reach < 1
    assert set(scores.metrics) == {"accuracy", "macro_f1", "f1/b", "f1/i", "f1/o"}


def test_retrieval_is_learnt(bert_folder: Path, pairs: Draw) -> None:
    """Each word of a document goes with one of its query: tested on others than learnt from."""
    settings = replace(LEARN, batch=32)
    task = Retrieval("toy", read=lambda: (pairs(200, 0), pairs(40, 1)), fine_tuning=settings)
    resting = task.run(str(bert_folder), task.load(), 0)
    tuned = replace(task, mode="fine-tune")
    learnt = tuned.run(str(bert_folder), tuned.load(), 0)
    assert learnt.value("ndcg@10") > resting.value("ndcg@10") + 0.2
    module = open_module(str(bert_folder))
    items = task.load().test
    vectors = [
        embed(module, list(texts), sequence_length=32)
        for texts in ([query.text for query in items.queries], items.documents.values())
    ]
    assert resting.value("ndcg@10") == ranking_scores(vectors[0], vectors[1], items).value("ndcg@10")


# Loading


def test_limits_take_items_from_everywhere(pairs: Draw) -> None:
    """Files are often sorted by class."""
    items = [LabelledText(str(number), "ab"[number >= 50]) for number in range(100)]
    task = Classification("t", read=lambda: (items, items), limit=10, test_limit=4)
    loaded = task.load()
    assert [item.text for item in loaded.train] == [str(10 * number) for number in range(10)]
    assert [item.text for item in loaded.test] == ["0", "25", "50", "75"]
    found = Retrieval("t", read=lambda: (None, pairs(10, 0)), test_limit=5).load().test
    assert [query.id for query in found.queries] == ["q0", "q2", "q4", "q6", "q8"]
    assert len(found.documents) == 10, "what is left out is a query, no document"


def test_groups_are_those_of_the_tested_items(labelled: Draw) -> None:
    task = Classification("t", read=lambda: (labelled(8, 0), labelled(6, 1)), test_limit=3)
    items = task.load()
    assert task.groups(items) == [item.group for item in items.test]
    assert task.num_items(items) == 3


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (
            Classification(
                "t", read=lambda: ([LabelledText("x", "a"), LabelledText("y", "b")], [LabelledText("z", "c")])
            ),
            r"^tasks\.t\.test must have only labels that are in tasks\.t\.train, got 'c'$",
        ),
        (
            Classification("t", read=lambda: ([LabelledText("x", "a")], [LabelledText("z", "a")])),
            r"^tasks\.t\.train must have at least two classes, got a$",
        ),
        (
            Classification("t", read=lambda: (2 * [LabelledText("x", "a"), LabelledText("y", "b")], []), limit=2),
            r"^tasks\.t\.train must have at least two classes, got a with limit 2$",
        ),
        (
            Tagging("t", read=lambda: ([TaggedWords(("x",), ("B-A",))], [TaggedWords(("x",), ("B-C",))])),
            r"^tasks\.t\.test must have only labels that are in tasks\.t\.train, got 'B-C'$",
        ),
        (
            Tagging("t", read=lambda: ([TaggedWords(("x",), ("NN",))], [])),
            r"^tasks\.t\.scheme IOB2 must have tags that begin with one of I, O, B, got 'NN'$",
        ),
    ],
)
def test_labels_that_cannot_be_are_said(task: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        task.load()


def test_word_outside_of_all_spans_needs_no_example() -> None:
    found = Tagging("t", read=lambda: ([TaggedWords(("x",), ("B-A",))], [TaggedWords(("x",), ("O",))])).load()
    assert found.classes == ["B-A", "O"]


# Settings


@pytest.mark.parametrize("kind", KINDS)
def test_settings_of_a_file_make_a_task(kind: str) -> None:
    files = {"text": "a.txt"} if kind == "perplexity" else {"train": "a.csv", "test": "b.csv"}
    task = make_task("t", {"kind": kind, **files})
    assert type(task) is KINDS[kind]
    assert (task.name, task.key) == ("t", "tasks.t")
    assert {name: getattr(task, name) for name in files} == files


def test_settings_of_fine_tuning_go_over_the_defaults() -> None:
    settings = {"kind": "classification", "train": "a", "test": "b", "fine_tuning": {"epochs": 7, "learning_rate": 1}}
    task: Any = make_task("t", settings)
    assert task.fine_tuning == FineTuning(epochs=7, learning_rate=1.0)
    changed: Any = override(task, "other", {"fine_tuning": {"batch": 4}, "mode": "probe", "limit": None})
    assert changed == replace(
        task, name="other", mode="probe", fine_tuning=FineTuning(epochs=7, learning_rate=1, batch=4)
    )


def test_protocol_says_what_a_figure_depends_on() -> None:
    resting = {"pooling": "mean", "sequence_length": 256}
    assert Perplexity("t").protocol == {"sequence_length": 512, "stride": 256, "mask_ratio": 0.15}
    assert Classification("t", mode="probe", limit=9).protocol == {"mode": "probe", **resting, "limit": 9}
    assert Retrieval("t").protocol == {"mode": "zero-shot", "drop_self_matches": False, **resting}
    assert Tagging("t").protocol["scheme"] == "IOB2"
    for task in (Classification("t"), Tagging("t"), Retrieval("t", mode="fine-tune")):
        assert task.is_seeded
        assert {"epochs", "batch", "learning_rate", "sequence_length"} <= task.protocol.keys()


FILES = {"train": "a.csv", "test": "b.csv"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (None, r"^tasks\.t\.kind must be one of perplexity, classification, tagging, retrieval, got None$"),
        ({"train": "a"}, r"^tasks\.t\.kind must be one of .*, got None$"),
        ({"kind": "ner"}, r"^tasks\.t\.kind must be one of .*, got 'ner'$"),
        ({"kind": ["tagging"]}, r"^tasks\.t\.kind must be one of .*, got \['tagging'\]$"),
        ({"kind": "tagging", **FILES, "schema": "IOB2"}, r"^tasks\.t\.schema is no setting of tagging; scheme\?$"),
        ({"kind": "tagging", **FILES, "scheme": "BIO"}, r"^tasks\.t\.scheme must be one of IOB1, .*, got 'BIO'$"),
        ({"kind": "tagging", **FILES, 3: "x"}, r"^tasks\.t\.3 is no setting of tagging$"),
        ({"kind": "tagging", "train": "a"}, r"^tasks\.t\.test must name a file or dataset, got None$"),
        ({"kind": "tagging", "train": "a", "test": 3}, r"^tasks\.t\.test must be str, got 3$"),
        ({"kind": "retrieval"}, r"^tasks\.t\.test must name a file or dataset, got None$"),
        (
            {"kind": "retrieval", "test": "a", "mode": "fine-tune"},
            r"^tasks\.t\.train must name a file or dataset, got N",
        ),
        (
            {"kind": "retrieval", "test": "a", "mode": "probe"},
            r"^tasks\.t\.mode must be one of fine-tune, zero-shot, got",
        ),
        (
            {"kind": "retrieval", "test": "a", "drop_self_matches": 1},
            r"^tasks\.t\.drop_self_matches must be bool, got 1$",
        ),
        (
            {"kind": "classification", **FILES, "mode": "zero-shot"},
            r"^tasks\.t\.mode must be one of fine-tune, probe, got",
        ),
        ({"kind": "classification", **FILES, "limit": 0}, r"^tasks\.t\.limit must be at least 1, got 0$"),
        ({"kind": "classification", **FILES, "limit": True}, r"^tasks\.t\.limit must be int, got True$"),
        ({"kind": "classification", **FILES, "read": "x"}, r"^tasks\.t\.read is no setting of classification$"),
        ({"kind": "perplexity", "text": ["a"]}, r"^tasks\.t\.text must be str, got \['a'\]$"),
        # It reads the first so many documents, and says so by another name.
        ({"kind": "perplexity", "text": "a", "limit": 3}, r"^tasks\.t\.limit is no setting of perplexity$"),
        ({"kind": "perplexity", "text": "a", "documents": 0}, r"^tasks\.t\.documents must be at least 1, got 0$"),
        (
            {"kind": "retrieval", **FILES, "mode": "fine-tune", "fine_tuning": {"batch": 1}},
            r"^tasks\.t\.fine_tuning\.batch must be at least 2 \(the other documents .*\), got 1$",
        ),
    ],
)
def test_bad_settings_are_said(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_task("t", settings)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, r"^tasks\.t\.fine_tuning must have settings of epochs, .*, temperature, got 3$"),
        ({"epoch": 3}, r"^tasks\.t\.fine_tuning\.epoch is no setting; epochs\?$"),
        ({"epochs": "3"}, r"^tasks\.t\.fine_tuning\.epochs must be int, got '3'$"),
        ({"epochs": 0}, r"^tasks\.t\.fine_tuning\.epochs must be at least 1, got 0$"),
        ({"learning_rate": "fast"}, r"^tasks\.t\.fine_tuning\.learning_rate must be float, got 'fast'$"),
        ({"pooling": "max"}, r"^tasks\.t\.fine_tuning\.pooling must be one of mean, first, got 'max'$"),
    ],
)
def test_bad_settings_of_fine_tuning_are_said(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_task("t", {"kind": "tagging", **FILES, "fine_tuning": given})


def test_preset_keeps_its_items() -> None:
    with pytest.raises(ValueError, match=r"^tasks\.t\.train must be one of .*limit.* beside a preset, got 'train'$"):
        override(Tagging("p", read=lambda: ([], [])), "t", {"train": "a.csv"})


# Models


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (
            Tagging("t", fine_tuning=FineTuning(sequence_length=129)),
            r"^tasks\.t\.fine_tuning\.sequence_length must be at most the 128 positions of '.*bert', got 129$",
        ),
        (
            Retrieval("t", fine_tuning=FineTuning(sequence_length=2)),
            r"^tasks\.t\.fine_tuning\.sequence_length must be above the 2 special tokens of '.*bert' around .*, got 2$",
        ),
        (Perplexity("t"), r"^tasks\.t\.sequence_length must be at most the 128 positions of '.*bert', got 512$"),
        (Perplexity("t", sequence_length=64, stride=64), r"^tasks\.t\.stride must be in \[1, 63\], got 64$"),
        (Perplexity("t", sequence_length=64, mask_ratio=2.0), r"^tasks\.t\.mask_ratio must be in \(0, 1\], got 2\.0$"),
    ],
)
def test_settings_that_do_not_fit_a_model_are_said(bert_folder: Path, task: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        task.check(open_module(str(bert_folder)))


def test_model_without_its_lm_head_has_no_perplexity(bert_folder: Path, tmp_path: Path, make_tokenizer: Any) -> None:
    """A new head knows nothing: its figure would be that of chance. All other tasks rest on the encoder."""
    from transformers import BertModel

    BertModel.from_pretrained(bert_folder).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    module = open_module(str(tmp_path))
    with pytest.raises(ValueError, match=r"^model\.backbone must have all of its weights, got '.*' without cls\."):
        Perplexity("t", sequence_length=64).check(module)
    Retrieval("t", fine_tuning=FineTuning(sequence_length=64)).check(module)
