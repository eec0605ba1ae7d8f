"""Documents out of files, and what is said about files that are wrong."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from lit_encoders.data.sources import TextSource, as_source, in_split

POEM = "one\ntwo\n\nthree\n  \t\nfour\nfive\n"


def write(path: Path, text: str) -> str:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return str(path)


def read(*files: str, **options: Any) -> list[str]:
    return list(TextSource(files, **options).documents())


def json_lines(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.mark.parametrize(
    ("sample_by", "documents"),
    [
        ("line", ["one", "two", "three", "four", "five"]),
        ("paragraph", ["one\ntwo\n", "three\n", "four\nfive\n"]),
        ("document", [POEM]),
    ],
)
@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.TEXT", "a.txt.gz"])
def test_plain_text_is_read_by_line_paragraph_or_file(
    tmp_path: Path, name: str, sample_by: Any, documents: list[str]
) -> None:
    assert read(write(tmp_path / name, POEM), sample_by=sample_by) == documents


@pytest.mark.parametrize("sample_by", ["line", "paragraph", "document"])
@pytest.mark.parametrize("text", ["", "\n", " \n\t\n\n"])
def test_blank_text_is_no_document(tmp_path: Path, sample_by: Any, text: str) -> None:
    assert read(write(tmp_path / "a.txt", text), sample_by=sample_by) == []


def test_last_line_needs_no_end_and_windows_ends_are_ends(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("één\r\ntwo".encode())
    assert read(str(tmp_path / "a.txt")) == ["één", "two"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.ndjson", "a.jsonl.gz"])
def test_json_lines_give_their_column(tmp_path: Path, name: str) -> None:
    text = json_lines({"text": "één\nline two", "id": 1}) + "\n  \n" + json_lines({"text": " "}, {"text": "two"})
    assert read(write(tmp_path / name, text)) == ["één\nline two", "two"]
    text = json_lines({"body": "three", "text": "no"})
    assert read(write(tmp_path / name, text), text_column="body") == ["three"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut', r"data\.val: line 4 of '.*a\.jsonl.*' must be JSON, got '\{\"text\": \"cut'"),
        (
            '{"body": "x", "id": 3}',
            r"line 4 of .* must have the column 'text' \(data\.text_column\), got body, id",
        ),
        ('["text"]', r"line 4 of .* must have the column 'text' .*, got list"),
        ('{"text": 7}', r"column 'text' in line 4 of .* must be text or a list of token ids, got 7"),
        ('{"text": null}', r"column 'text' in line 4 of .* must be text or a list of token ids, got None"),
    ],
)
def test_wrong_line_of_json_is_named_by_its_number(tmp_path: Path, name: str, line: str, message: str) -> None:
    """Blank lines count, so that an editor finds the place."""
    path = write(tmp_path / name, json_lines({"text": "a"}, {"text": "b"}) + "\n" + line + "\n")
    documents = TextSource((path,), key="data.val").documents()
    assert [next(documents), next(documents)] == ["a", "b"]
    with pytest.raises(ValueError, match=message) as caught:
        next(documents)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["missing.txt", "none-*.jsonl", ""])
def test_missing_file_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"data\.train must name files that exist, got '"):
        TextSource((str(tmp_path / name),)).paths()


@pytest.mark.parametrize("name", ["a.xlsx", "a.gz", "a.zst", "a", "a.pdf.gz", "a.txt.gz.zst", "a.parquet.gz"])
def test_unknown_ending_is_an_error(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, "text")
    with pytest.raises(ValueError, match=r"data\.train must end in one of \.csv, .*\.txt .*\.zst after it\), got '.*a"):
        TextSource((path,)).paths()


def test_folder_that_is_no_dataset_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "text")
    with pytest.raises(
        ValueError, match=r"must name files that exist, got '.*' \(a folder that `save_to_disk` did not"
    ):
        TextSource((str(tmp_path),)).paths()


def test_every_name_is_found_before_the_first_document_is_read(tmp_path: Path) -> None:
    first = write(tmp_path / "a.txt", "one")
    with pytest.raises(ValueError, match=r"must name files that exist"):
        next(TextSource((first, str(tmp_path / "none.txt"))).documents())


def test_globs_are_sorted_and_files_keep_the_order_given(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "a.txt", "deep/c.txt"):
        write(tmp_path / name, name)
    last = write(tmp_path / "0.jsonl", json_lines({"text": "json"}))
    source = as_source([str(tmp_path / "**" / "*.txt"), last], "text", "line", "data.train")
    assert list(source.documents()) == ["a.txt", "b.txt", "deep/c.txt", "json"]
    assert [path.name for path in source.paths()] == ["a.txt", "b.txt", "c.txt", "0.jsonl"]


def test_one_name_and_several_make_a_source() -> None:
    assert as_source("a.txt", "text", "line", "data.val") == TextSource(("a.txt",), key="data.val")
    assert as_source(["a.txt", "b.txt"], "body", "document", "data.train").files == ("a.txt", "b.txt")


def test_digest_follows_content_order_and_reading_not_names(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.txt", "one\n"), write(tmp_path / "b.txt", "two\n")
    copy = write(tmp_path / "c.txt", "one\n")
    digest = TextSource((first, second)).digest()
    assert TextSource((copy, second)).digest() == digest
    others = [
        TextSource((second, first)),
        TextSource((first,)),
        TextSource((first, second), sample_by="document"),
        TextSource((first, second), text_column="body"),
    ]
    assert len({digest, *(other.digest() for other in others)}) == 5
    write(tmp_path / "a.txt", "One\n")
    assert TextSource((first, second)).digest() != digest


def test_digest_follows_the_kind_of_file(tmp_path: Path) -> None:
    """The same bytes are other documents under another ending."""
    digests = {
        TextSource((write(tmp_path / name, '{"text": "x"}\n'),)).digest() for name in ("a.txt", "a.jsonl", "a.csv")
    }
    assert len(digests) == 3


def test_file_that_may_not_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.txt", "one")

    def refuse(*arguments: Any, **options: Any) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=r"data\.train must be readable, got '.*a\.txt' \(Permission denied\)"):
        TextSource((path,)).digest()
    with pytest.raises(ValueError, match=r"data\.train must be readable as UTF-8 text, got '.*a\.txt' \(.*denied"):
        read(path)


def test_example_of_several_files_has_a_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lit_encoders.data import sources
    from lit_encoders.data.examples import Example

    (tmp_path / "b").mkdir()
    write(tmp_path / "b" / "b.txt", "two")
    write(tmp_path / "a.txt", "one")
    example = Example("words", "none", "none", lambda path: (file.read_text() for file in sorted(path.rglob("*.txt"))))
    monkeypatch.setattr(sources, "find_example", lambda name: (example, tmp_path))
    assert read("example:words") == ["one", "two"]
    digest = TextSource(("example:words",)).digest()
    assert TextSource(("example:words",)).digest() == digest
    write(tmp_path / "b" / "b.txt", "three")
    assert TextSource(("example:words",)).digest() != digest


def test_unknown_example_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"example must be one of minilm, .*, got 'nothing'"):
        TextSource(("example:nothing",)).paths()


def test_model_is_no_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from lit_encoders.data import sources
    from lit_encoders.data.examples import EXAMPLES

    monkeypatch.setattr(sources, "find_example", lambda name: (EXAMPLES["minilm"], tmp_path))
    with pytest.raises(ValueError, match=r"data\.train must name a text, got the model 'example:minilm'"):
        read("example:minilm")


# Records


@pytest.fixture(params=["a.csv", "a.tsv", "a.jsonl", "a.jsonl.gz", "a.parquet", "saved"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Two records of three columns, one of them blank, in every form that has columns."""
    rows = [{"text": "one, two", "label": "a", "part": ""}, {"text": "three", "label": " ", "part": "x"}]
    path = tmp_path / request.param
    if path.suffix in (".csv", ".tsv"):
        mark = "," if path.suffix == ".csv" else "\t"
        lines = [rows[0].keys(), *(row.values() for row in rows)]
        return write(path, "".join(mark.join(f'"{value}"' for value in line) + "\n" for line in lines))
    if path.suffix in (".jsonl", ".gz"):
        return write(path, json_lines(*rows))
    from datasets import Dataset

    made = Dataset.from_list(rows)
    if path.suffix == ".parquet":
        made.to_parquet(path)
    else:
        made.save_to_disk(path)
    return str(path)


def test_records_give_several_columns_blank_ones_too(table: str) -> None:
    found = list(as_source(table, "text", "line", "tasks.t.train").records({"t.label": "label", "t.text": "text"}))
    assert [values for _, values in found] == [("a", "one, two"), (" ", "three")]
    places = [place for place, _ in found]
    assert all(table in place for place in places)
    assert len(set(places)) == 2
    (again,) = {
        values
        for _, values in as_source([table, table], "x", "line", "k").records({"a": "part", "b": "part"})
        if values[0]
    }
    assert again == ("x", "x"), "a column may be asked for twice"


def test_records_name_the_setting_of_a_missing_column(table: str) -> None:
    source = as_source(table, "text", "line", "tasks.t.train")
    with pytest.raises(
        ValueError, match=r"^tasks\.t\.train: .* must have the column 'labl' \(t\.label\), got .*; label\?$"
    ):
        list(source.records({"t.text": "text", "t.label": "labl"}))


def test_records_keep_what_is_no_text(tmp_path: Path) -> None:
    """Lists, numbers and nothing: who asks for a column knows what it has to be."""
    file = write(tmp_path / "a.jsonl", json_lines({"a": ["x"], "b": None}, {"a": 3, "b": True}))
    source = as_source(file, "text", "line", "k")
    assert [values for _, values in source.records({"s.a": "a", "s.b": "b"})] == [(["x"], None), (3, True)]


@pytest.mark.parametrize("name", ["a.txt", "a.md.gz"])
def test_plain_text_has_no_records(tmp_path: Path, name: str) -> None:
    """Else every column would be the line."""
    source = as_source(write(tmp_path / name, "one\ntwo\n"), "text", "line", "tasks.t.train")
    with pytest.raises(
        ValueError, match=r"^tasks\.t\.train: '.*' must have the column 'text' \(t\.text\), got plain text$"
    ):
        list(source.records({"t.text": "text", "t.label": "label"}))


def test_example_text_has_no_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lit_encoders.data import sources
    from lit_encoders.data.examples import EXAMPLES

    monkeypatch.setattr(sources, "find_example", lambda name: (EXAMPLES["hpo"], tmp_path))
    with pytest.raises(ValueError, match=r"^k: '.*' must have the column 'label' \(s\.label\), got plain text$"):
        list(as_source("example:hpo", "text", "line", "k").records({"s.label": "label"}))


def test_split_goes_by_content_and_has_the_share_asked_for() -> None:
    texts = [f"document {number}" for number in range(20_000)]
    held_out = {text for text in texts if in_split(text, 0.1)}
    assert len(held_out) / 20_000 == pytest.approx(0.1, abs=0.01)
    assert held_out == {text for text in reversed(texts) if in_split(text, 0.1)}
    # A larger share holds every text of a smaller one.
    assert held_out < {text for text in texts if in_split(text, 0.2)}
    assert not any(in_split(text, 0.0) for text in texts)
    assert all(in_split(text, 1.0) for text in texts)


def test_split_takes_equal_ids_to_the_same_side() -> None:
    documents = [[number % 50, number // 50, 7] for number in range(20_000)]
    sides = [in_split(ids, 0.1) for ids in documents]
    assert sum(sides) / 20_000 == pytest.approx(0.1, abs=0.01)
    assert sides == [in_split(list(ids), 0.1) for ids in documents]
    assert len({in_split(ids, 0.5) for ids in ([1, 2], [2, 1], [1, 2, 0], [1], [2], [256])}) == 2
