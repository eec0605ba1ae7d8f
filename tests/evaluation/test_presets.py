"""Tasks of the example texts: out of the packages that are there, and out of small files in the others' form."""

from __future__ import annotations

import sqlite3
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest

from lit_encoders.data.examples import EXAMPLES, find_example
from lit_encoders.data.ontology import read_obo_terms
from lit_encoders.data.sources import in_split
from lit_encoders.evaluation import presets
from lit_encoders.evaluation.items import TaggedWords
from lit_encoders.evaluation.presets import HELD_OUT, PRESETS


def is_installed(name: str) -> bool:
    try:
        return bool(distribution(EXAMPLES[name].package.partition("==")[0]))
    except PackageNotFoundError:
        return False


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let examples be files made on the spot."""
    places: dict[str, Path] = {}
    monkeypatch.setattr(presets, "find_example", lambda name: (EXAMPLES[name], places[name]))
    return places


needs_hpo = pytest.mark.skipif(not is_installed("hpo"), reason="the demo extra is not installed")


@needs_hpo
def test_branches_are_tested_on_definitions_held_out() -> None:
    items = PRESETS["hpo_branches"].load()
    train, test = ({item.text for item in side} for side in (items.train, items.test))
    # As `data.val_share` holds them out of the example's text: a model trained on the rest has read none.
    assert not any(in_split(text, HELD_OUT) for text in train)
    assert all(in_split(text, HELD_OUT) for text in test)
    assert 0.07 < len(test) / (len(train) + len(test)) < 0.13
    assert len(items.test) >= 200, "models can be compared on them"
    assert {item.label for item in items.test} <= set(items.classes)
    assert all(label.startswith("HP:") for label in items.classes)
    assert 10 < len(items.classes) < 30


@needs_hpo
def test_synonyms_are_sought_among_definitions_held_out() -> None:
    items: Any = PRESETS["hpo_synonyms"].load()
    terms = list(read_obo_terms(find_example("hpo")[1]))
    synonyms = {(term.synonyms[0], term.definition) for term in terms if term.synonyms and term.definition}
    for side, held_out in ((items.train, False), (items.test, True)):
        assert len(side.queries) > 200
        assert all(in_split(text, HELD_OUT) is held_out for text in side.documents.values())
        for query in side.queries:
            (answer,) = query.relevant
            assert (query.text, side.documents[answer]) in synonyms
            assert query.text.lower() not in side.documents[answer].lower()
    assert not set(items.train.documents.values()) & set(items.test.documents.values())
    # No query has a document's id: leaving such hits out would leave out answers.
    assert not {query.id for query in items.test.queries} & set(items.test.documents)


def test_synonyms_of_genes_come_from_its_tables(example: Any, tmp_path: Path) -> None:
    file = tmp_path / "go.sqlite"
    with sqlite3.connect(file) as database:
        database.execute("CREATE TABLE go_term (_id INTEGER, go_id TEXT, definition TEXT)")
        database.execute("CREATE TABLE go_synonym (_id INTEGER, synonym TEXT, like_go_id INTEGER)")
        terms = [(n, f"GO:{n:03}", f"Definition number {n}.") for n in range(60)]
        database.executemany("INSERT INTO go_term VALUES (?, ?, ?)", [*terms, (60, "GO:060", None)])
        synonyms = [(n, f"{word} {n}", 0) for n in range(61) for word in ("second", "first")]
        database.executemany(
            "INSERT INTO go_synonym VALUES (?, ?, ?)",
            [*synonyms, (0, "GO:900", 1), (1, "NUMBER 1", 0), (1, "definition", 0)],
        )
    example["go"] = file
    items: Any = PRESETS["go_synonyms"].load()
    found = {
        side.documents[next(iter(query.relevant))]: query.text
        for side in (items.train, items.test)
        for query in side.queries
    }
    # One for each, the first by name that the definition does not hold itself.
    assert found == {f"Definition number {n}.": f"first {n}" for n in range(60)}


def test_titles_are_sought_in_the_other_language(example: Any, tmp_path: Path) -> None:
    example["icd10-fr"] = tmp_path / "fr.po"
    entries = [f'msgid "Title {n}"\nmsgstr "Titre {n}"\n' for n in range(60)]
    example["icd10-fr"].write_text("\n".join([*entries, 'msgid "Untranslated"\nmsgstr ""\n']))
    items: Any = PRESETS["icd10_fr"].load()
    for side in (items.train, items.test):
        for query in side.queries:
            assert side.documents[next(iter(query.relevant))] == query.text.replace("Titre", "Title")
    assert len(items.train.queries) + len(items.test.queries) == 60
    assert items.test.queries


def test_texts_with_a_split_of_their_own_keep_it(example: Any, tmp_path: Path) -> None:
    for name, texts in (("r8", ["a one", "b two"]), ("r8-test", ["b three"])):
        rows = "".join(f"{text[0]}\t{text}\n" for text in texts)
        example[name] = tmp_path / f"{name}.tab"
        example[name].write_text(f"Category\tText\nd\tstring\nclass\t\n{rows}")
    items = PRESETS["r8"].load()
    assert [(item.text, item.label) for item in items.train] == [("a one", "a"), ("b two", "b")]
    assert [(item.text, item.label) for item in items.test] == [("b three", "b")]


def test_tweets_are_split_by_content(example: Any, tmp_path: Path) -> None:
    example["tweets"] = tmp_path / "tweets.txt"
    lines = [f"word{n % 50}\tO\nParis\tB-geo\n\t\n" for n in range(100)]
    example["tweets"].write_text("".join(lines))
    items = PRESETS["tweets"].load()
    train, test = ({item.words for item in side} for side in (items.train, items.test))
    assert len(train) + len(test) == 50
    assert not train & test, "what stands twice stands on one side"
    assert 3 < len(test) < 20


def test_whole_texts_are_held_out_of_brown_with_plain_tags(example: Any, tmp_path: Path) -> None:
    example["brown"] = tmp_path
    for number in range(1, 45):
        line = f"The/at-tl dog/nn can't/md* have/hv seen/vbn+rp {number}/cd ``/`` it's/ppss+bez ./.\n"
        (tmp_path / f"ca{number:02}").write_text(line)
    items = PRESETS["brown"].load()
    assert len(items.train) + len(items.test) == 44
    assert {item.words[5] for item in items.test} == {str(n) for n in range(1, 45) if in_split(f"ca{n:02}", HELD_OUT)}
    tags = ("at", "nn", "md", "hv", "vbn", "cd", "`", "ppss", ".")
    assert items.train[0] == TaggedWords(
        ("The", "dog", "can't", "have", "seen", items.train[0].words[5], "``", "it's", "."), tags, "a"
    )


@pytest.mark.parametrize("name", PRESETS)
def test_preset_stands_under_its_name_and_reads_its_own_items(name: str) -> None:
    task: Any = PRESETS[name]
    assert task.name == name
    assert task.read is not None
