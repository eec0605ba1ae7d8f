"""Items of evaluation tasks, out of files or `datasets`: labelled texts, tagged words, queries with their documents."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_encoders.data.sources import as_source


@dataclass(frozen=True)
class LabelledText:
    """A text with its class.

    Attributes:
        text: to classify.
        label: its class.
        group: that wins and losses are counted by; "" for none.
    """

    text: str
    label: str
    group: str = ""


@dataclass(frozen=True)
class TaggedWords:
    """Words with a tag each.

    Attributes:
        words: of a sentence.
        tags: of each word.
        group: see `LabelledText`.
    """

    words: tuple[str, ...]
    tags: tuple[str, ...]
    group: str = ""


@dataclass(frozen=True)
class Query:
    """A text to search with.

    Attributes:
        id: of the query.
        text: of the query.
        relevant: grade of each document that answers it, above 0, by the document's id.
        group: see `LabelledText`.
    """

    id: str
    text: str
    relevant: Mapping[str, float]
    group: str = ""


@dataclass(frozen=True)
class Collection:
    """Queries, and the documents among which their answers are.

    Attributes:
        documents: text by id, in order.
        queries: with the ids of their documents.
    """

    documents: Mapping[str, str]
    queries: Sequence[Query]


def read_columns(files: str | Sequence[str], key: str, columns: Mapping[str, str]) -> Iterator[tuple[str, list[Any]]]:
    """Yield the values of columns of every record, with the place for messages.

    Args:
        files: as data.train takes them, with columns.
        key: the setting that names the files, for messages.
        columns: setting -> name of the column; a column named "" is left out and gives "".

    Raises:
        ValueError: a file cannot be read or lacks a column; the message names the setting.
    """
    wanted = {f"{key.rpartition('.')[0]}.{setting}": name for setting, name in columns.items() if name}
    asked = [bool(name) for name in columns.values()]
    for place, values in as_source(files, "text", "line", key).records(wanted):
        given = iter(values)
        yield place, [next(given) if there else "" for there in asked]


def read_labelled(files: str | Sequence[str], key: str, text: str, label: str, group: str = "") -> list[LabelledText]:
    """Read labelled texts.

    Args:
        files: see `read_columns`.
        key: see `read_columns`.
        text, label, group: columns; no group is "".

    Raises:
        ValueError: a column is missing, a text is blank, or a label is neither a name nor a whole number.
    """
    items = []
    for place, (words, name, part) in read_columns(files, key, {"text": text, "label": label, "group": group}):
        items.append(
            LabelledText(
                _text(words, place, key, text), _label(name, place, key, label), _name(part, place, key, group)
            )
        )
    return _some(items, key, files)


def read_tagged(files: str | Sequence[str], key: str, tokens: str, tags: str, group: str = "") -> list[TaggedWords]:
    """Read tagged words: two columns of lists of one length; sentences without words are left out.

    Raises:
        ValueError: a column is missing, is no list of texts, the two are not of one length, or a tag is blank.
    """
    items = []
    for place, (words, marks, part) in read_columns(files, key, {"tokens": tokens, "tags": tags, "group": group}):
        for column, values in ((tokens, words), (tags, marks)):
            if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
                raise ValueError(f"{key}: column {column!r} in {place} must be a list of texts, got {values!r:.60}")
        if len(words) != len(marks):
            raise ValueError(f"{key}: {place} must have a tag for each word, got {len(words)} words, {len(marks)} tags")
        if not all(mark.strip() for mark in marks):
            raise ValueError(f"{key}: column {tags!r} in {place} must have no blank tag, got {marks!r:.60}")
        if words:
            items.append(TaggedWords(tuple(words), tuple(marks), _name(part, place, key, group)))
    return _some(items, key, files)


def read_pairs(files: str | Sequence[str], key: str, query: str, document: str, group: str = "") -> Collection:
    """Read pairs of a query and a document that answers it; equal documents are one, as are equal queries of a group.

    Ids begin with "q" and "d": no query has the id of a document.

    Raises:
        ValueError: a column is missing or is no text.
    """
    documents: dict[str, str] = {}
    answers: dict[tuple[str, str], dict[str, float]] = {}
    columns = {"query": query, "document": document, "group": group}
    for place, (asked, answer, part) in read_columns(files, key, columns):
        number = documents.setdefault(_text(answer, place, key, document), f"d{len(documents)}")
        asked_for = _text(asked, place, key, query), _name(part, place, key, group)
        answers.setdefault(asked_for, {})[number] = 1.0
    queries = [Query(f"q{place}", text, answers[text, part], part) for place, (text, part) in enumerate(answers)]
    return Collection({number: text for text, number in documents.items()}, _some(queries, key, files))


def read_collection(folder: str, key: str) -> Collection:
    """Read a collection in BEIR's form: corpus.jsonl, queries.jsonl, and qrels/test.tsv or qrels.tsv.

    A document is its title, where the corpus has a column of them, and its text. Queries that nothing answers are left
    out.

    Raises:
        ValueError: a file or column is missing, an id stands twice, a grade is no number, or a judgement names a
            document or query that is not there.
    """
    root = Path(folder)
    judged = next((path for path in (root / "qrels" / "test.tsv", root / "qrels.tsv") if path.is_file()), None)
    if judged is None:
        raise ValueError(f"{key} must hold qrels/test.tsv or qrels.tsv beside corpus.jsonl, got '{folder}'")
    documents, asked = _texts_by_id(root / "corpus.jsonl", key), _texts_by_id(root / "queries.jsonl", key)
    relevant: dict[str, dict[str, float]] = {}
    names = {"query": "query-id", "document": "corpus-id", "grade": "score"}
    for place, (query, document, grade) in read_columns(str(judged), key, names):
        if str(query) not in asked or str(document) not in documents:
            raise ValueError(f"{key}: {place} must name a query and a document that are there, got {query}, {document}")
        if _grade(grade, place, key) > 0:
            relevant.setdefault(str(query), {})[str(document)] = _grade(grade, place, key)
    queries = [Query(number, asked[number], grades) for number, grades in relevant.items()]
    return Collection(documents, _some(queries, key, folder))


def _texts_by_id(path: Path, key: str) -> dict[str, str]:
    columns = {"id": "_id", "title": "title" if _has_titles(path) else "", "text": "text"}
    found: dict[str, str] = {}
    for place, (number, title, text) in read_columns(str(path), key, columns):
        if str(number) in found:
            raise ValueError(f"{key}: {place} must have an id of its own, got {number!r} again")
        whole = f"{title} {text}".strip() if isinstance(title, str) and isinstance(text, str) else text
        found[str(number)] = _text(whole, place, key, "text")
    return found


def _has_titles(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8-sig") as file:
            return "title" in json.loads(next(line for line in file if not line.isspace()))
    except (OSError, ValueError, TypeError, StopIteration):
        return False  # What is wrong with the file is said where it is read.


def _grade(value: Any, place: str, key: str) -> float:
    try:
        grade = float(value)
    except (TypeError, ValueError):
        grade = math.nan
    if not math.isfinite(grade):
        raise ValueError(f"{key}: column 'score' in {place} must be a number, got {value!r:.60}")
    return grade


def _text(value: Any, place: str, key: str, column: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{key}: column {column!r} in {place} must be text that is not blank, got {value!r:.60}")
    return value


def _name(value: Any, place: str, key: str, column: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ValueError(f"{key}: column {column!r} in {place} must be a name or a whole number, got {value!r:.60}")
    return str(value)


def _label(value: Any, place: str, key: str, column: str) -> str:
    label = _name(value, place, key, column)
    if not label.strip():
        raise ValueError(f"{key}: column {column!r} in {place} must be a name that is not blank, got {value!r}")
    return label


def _some(items: list[Any], key: str, files: Any) -> list[Any]:
    if not items:
        raise ValueError(f"{key} must hold at least one item, got none in {files!r}")
    return items
