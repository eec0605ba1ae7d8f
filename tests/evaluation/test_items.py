"""Items out of files, and what is said about files that are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lit_encoders.evaluation.items import (
    Collection,
    LabelledText,
    Query,
    TaggedWords,
    read_collection,
    read_labelled,
    read_pairs,
    read_tagged,
)

KEY = "tasks.t.test"


def test_labelled_texts_have_text_class_and_group(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('body,class,part\n"one, two",a,x\nthree,7,\n')
    assert read_labelled(str(tmp_path / "a.csv"), KEY, "body", "class", "part") == [
        LabelledText("one, two", "a", "x"),
        LabelledText("three", "7", ""),
    ]
    assert [item.group for item in read_labelled(str(tmp_path / "a.csv"), KEY, "body", "class")] == ["", ""]


def test_classes_that_are_numbers_are_names(write: Any) -> None:
    files = [write("a.jsonl", [{"text": "one", "label": 0}]), write("b.jsonl", [{"text": "two", "label": "0"}])]
    assert read_labelled(files, KEY, "text", "label") == [LabelledText("one", "0"), LabelledText("two", "0")]


def test_items_come_out_of_saved_datasets(tmp_path: Path) -> None:
    from datasets import Dataset

    records = [{"tokens": ["a", "b"], "tags": ["B-X", "O"]}, {"tokens": [], "tags": []}]
    Dataset.from_list(records).save_to_disk(tmp_path / "saved")
    assert read_tagged(str(tmp_path / "saved"), KEY, "tokens", "tags") == [TaggedWords(("a", "b"), ("B-X", "O"))]


def test_equal_documents_and_equal_queries_are_one(write: Any) -> None:
    """A document that answers two queries stands once; a query with two answers is right with either."""
    pairs = [("q one", "first"), ("q two", "second"), ("q three", "first"), ("q one", "second")]
    file = write("a.jsonl", [{"query": query, "document": document} for query, document in pairs])
    found = read_pairs(file, KEY, "query", "document")
    assert found.documents == {"d0": "first", "d1": "second"}
    assert [(query.text, query.relevant) for query in found.queries] == [
        ("q one", {"d0": 1.0, "d1": 1.0}),
        ("q two", {"d1": 1.0}),
        ("q three", {"d0": 1.0}),
    ]
    # Numbers alone would give the first query the id of its answer, which `drop_self_matches` would leave out.
    assert not {query.id for query in found.queries} & set(found.documents)


def test_queries_of_two_groups_stay_apart(write: Any) -> None:
    records = [{"query": "same", "document": f"answer {part}", "part": part} for part in "ab"]
    found = read_pairs(write("a.jsonl", records), KEY, "query", "document", "part")
    assert [(query.group, query.relevant) for query in found.queries] == [("a", {"d0": 1.0}), ("b", {"d1": 1.0})]


@pytest.fixture
def beir(tmp_path: Path, write: Any) -> Path:
    """A collection in BEIR's form: grades, a query without an answer, a document of a title alone."""
    write("corpus.jsonl", [{"_id": "a", "title": "Head", "text": "body"}, {"_id": "b", "title": "Only", "text": ""}])
    write("queries.jsonl", [{"_id": "q1", "text": "one"}, {"_id": "q2", "text": "two"}, {"_id": "a", "text": "three"}])
    (tmp_path / "qrels").mkdir()
    judged = "query-id\tcorpus-id\tscore\nq1\ta\t2\nq1\tb\t1\nq2\ta\t0\na\ta\t1\n"
    (tmp_path / "qrels" / "test.tsv").write_text(judged)
    return tmp_path


def test_collection_has_documents_queries_and_grades(beir: Path) -> None:
    expected = Collection(
        {"a": "Head body", "b": "Only"},
        [Query("q1", "one", {"a": 2.0, "b": 1.0}), Query("a", "three", {"a": 1.0})],
    )
    assert read_collection(str(beir), KEY) == expected
    (beir / "qrels" / "test.tsv").rename(beir / "qrels.tsv")
    assert read_collection(str(beir), KEY) == expected


def test_titles_may_be_absent(beir: Path, write: Any) -> None:
    write("corpus.jsonl", [{"_id": "a", "text": "body"}, {"_id": "b", "text": "other"}])
    assert read_collection(str(beir), KEY).documents == {"a": "body", "b": "other"}


# Mistakes


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"text": "one"},
            r"tasks\.t\.test: line 1 of '.*' must have the column 'label' \(tasks\.t\.label\), got text$",
        ),
        ({"text": " ", "label": "a"}, r"column 'text' in line 1 of '.*' must be text that is not blank, got ' '$"),
        (
            {"text": ["a"], "label": "a"},
            r"column 'text' in line 1 of '.*' must be text that is not blank, got \['a'\]$",
        ),
        (
            {"text": "one", "label": 0.5},
            r"column 'label' in line 1 of '.*' must be a name or a whole number, got 0\.5$",
        ),
        (
            {"text": "one", "label": None},
            r"column 'label' in line 1 of '.*' must be a name or a whole number, got None$",
        ),
        ({"text": "one", "label": ""}, r"column 'label' in line 1 of '.*' must be a name that is not blank, got ''$"),
    ],
)
def test_bad_labelled_texts_are_said(write: Any, record: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_labelled(write("a.jsonl", [record]), KEY, "text", "label")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"tokens": "a b", "tags": ["O"]}, r"column 'tokens' in line 1 of '.*' must be a list of texts, got 'a b'$"),
        ({"tokens": ["a"], "tags": [3]}, r"column 'tags' in line 1 of '.*' must be a list of texts, got \[3\]$"),
        ({"tokens": ["a"], "tags": []}, r"must have a tag for each word, got 1 words, 0 tags$"),
        ({"tokens": ["a"], "tags": [""]}, r"column 'tags' in line 1 of '.*' must have no blank tag, got \[''\]$"),
        ({"tokens": [], "tags": []}, r"^tasks\.t\.test must hold at least one item, got none in '.*'$"),
    ],
)
def test_bad_tagged_words_are_said(write: Any, record: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_tagged(write("a.jsonl", [record]), KEY, "tokens", "tags")


def test_plain_text_has_no_columns(tmp_path: Path) -> None:
    """Else every column would be the line, and each text a class of its own."""
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    with pytest.raises(
        ValueError, match=r"^tasks\.t\.test: '.*a\.txt' must have the column 'text' \(tasks\.t\.text\), got"
    ):
        read_labelled(str(tmp_path / "a.txt"), KEY, "text", "label")


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\nq1\tz\t1\n", r"line 2 of .* are there, got q1, z$"),
        (
            "qrels/test.tsv",
            "query-id\tcorpus-id\tscore\nq1\ta\tmany\n",
            r"column 'score' in line 2 of '.*' must be a num",
        ),
        (
            "qrels/test.tsv",
            "query-id\tcorpus-id\tscore\nq1\ta\tnan\n",
            r"column 'score' in line 2 of '.*' must be a num",
        ),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\nq1\ta\t0\n", r"must hold at least one item, got none in"),
        (
            "qrels/test.tsv",
            "query\tcorpus-id\tscore\nq1\ta\t1\n",
            r"must have the column 'query-id' \(tasks\.t\.query\)",
        ),
        (
            "corpus.jsonl",
            '{"_id": "a", "text": "x"}\n{"_id": "a", "text": "y"}\n',
            r"line 2 of .* of its own, got 'a' ag",
        ),
        (
            "corpus.jsonl",
            '{"_id": "a", "title": "", "text": ""}\n',
            r"column 'text' in line 1 of '.*' must be text that",
        ),
        ("corpus.jsonl", "none\n", r"line 1 of '.*corpus\.jsonl' must be JSON, got 'none'"),
        ("queries.jsonl", '{"id": "a", "text": "x"}\n', r"must have the column '_id' \(tasks\.t\.id\), got id, text"),
    ],
)
def test_bad_collections_are_said(beir: Path, file: str, text: str, message: str) -> None:
    (beir / file).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_collection(str(beir), KEY)


@pytest.mark.parametrize("file", ["corpus.jsonl", "queries.jsonl", "qrels/test.tsv"])
def test_missing_parts_of_a_collection_are_said(beir: Path, file: str) -> None:
    (beir / file).unlink()
    with pytest.raises(ValueError, match=r"^tasks\.t\.test must (name files that exist|hold qrels/test\.tsv)"):
        read_collection(str(beir), KEY)
