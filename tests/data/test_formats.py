"""Every kind of file gives the documents that plain text gives, and says what is wrong with it in one line."""

import csv
import gzip
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from lit_encoders.data.sources import TextSource
from lit_encoders.data.tokens import TokenIds

# Commas, quotes, tabs, accents and another script; no line breaks, so that plain text can hold them.
DOCUMENTS = ["plain words", 'a "quoted", part', "tab\there", "été", "ภาษาไทย", "'single'", "x" * 200_000]
IDS = [[5, 6, 7], [2, 94, 3], [8]]


def of_csv(documents: list[str], delimiter: str = ",", **options: Any) -> str:
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter, **{"lineterminator": "\n", **options})
    writer.writerows([["number", "text"], *enumerate(documents)])
    return text.getvalue()


def of_json(documents: list[Any], column: str = "text") -> str:
    return "".join(json.dumps({"number": 1, column: document}) + "\n" for document in documents)


PLAIN: dict[str, Callable[[list[str]], str]] = {
    ".txt": lambda documents: "\n".join(documents) + "\n",
    ".jsonl": of_json,
    ".csv": of_csv,
    ".tsv": lambda documents: of_csv(documents, "\t"),
}


def write(path: Path, content: str | bytes | pa.Table) -> str:
    """Write by ending, compressed as it says."""
    if isinstance(content, pa.Table):
        parquet.write_table(content, path)
        return str(path)
    data = content.encode() if isinstance(content, str) else content
    if path.suffix.lower() == ".zst":
        with pa.output_stream(str(path), compression="zstd") as file:
            file.write(data)
    else:
        path.write_bytes(gzip.compress(data) if path.suffix.lower() == ".gz" else data)
    return str(path)


def read(path: str, **options: Any) -> list[Any]:
    return list(TextSource((path,), **options).documents())


def message_of(path: str, **options: Any) -> str:
    """What is said of a file, which must be one line."""
    with pytest.raises(ValueError) as caught:
        read(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("packed", ["", ".gz", ".zst", ".GZ", ".ZST"])
@pytest.mark.parametrize("ending", PLAIN)
def test_text_and_tables_give_the_same_documents(tmp_path: Path, ending: str, packed: str) -> None:
    path = write(tmp_path / f"a{ending}{packed}", PLAIN[ending]([*DOCUMENTS, " ", ""]))
    assert read(path) == DOCUMENTS


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
@pytest.mark.parametrize("ending", PLAIN)
def test_windows_ends_and_a_byte_order_mark_change_nothing(tmp_path: Path, ending: str, packed: str) -> None:
    unix = PLAIN[ending](DOCUMENTS)
    path = write(tmp_path / f"a{ending}{packed}", b"\xef\xbb\xbf" + unix.replace("\n", "\r\n").encode())
    assert read(path) == DOCUMENTS


@pytest.mark.parametrize("sample_by", ["paragraph", "document"])
@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
def test_windows_ends_within_a_document_are_unix_ends(tmp_path: Path, sample_by: Any, packed: str) -> None:
    text = "one\ntwo\n\nthree\n"
    unix = write(tmp_path / f"unix.txt{packed}", text)
    windows = write(tmp_path / f"windows.txt{packed}", text.replace("\n", "\r\n"))
    assert read(windows, sample_by=sample_by) == read(unix, sample_by=sample_by)
    assert read(unix, sample_by="document") == [text]


def test_fields_of_csv_may_hold_lines_and_the_ends_of_windows_are_ends(tmp_path: Path) -> None:
    documents = ["one\ntwo", "three\n\nfour, five", 'six "7"\n']
    unix = of_csv(documents)
    assert read(write(tmp_path / "unix.csv", unix)) == documents
    assert read(write(tmp_path / "windows.csv", unix.replace("\n", "\r\n"))) == documents


def test_long_fields_leave_the_limit_of_csv_as_it_was(tmp_path: Path) -> None:
    before = csv.field_size_limit()
    documents = TextSource((write(tmp_path / "a.csv", of_csv(["x" * 200_000, "y"])),)).documents()
    assert len(next(documents)) == 200_000 > before  # type: ignore[operator]
    assert csv.field_size_limit() == before


def test_numbers_and_empty_values_of_csv_stay_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'text\n007\n\n1e3\nNA\nnull\n" "\n"[1, 2]"\n')
    assert read(path) == ["007", "1e3", "NA", "null", "[1, 2]"]


@pytest.mark.parametrize("content", ["", "\n\n", "text\n", "text\n\n \n"])
def test_csv_without_documents_is_empty(tmp_path: Path, content: str) -> None:
    assert read(write(tmp_path / "a.csv", content)) == []


@pytest.mark.parametrize("ending", [".txt", ".jsonl", ".csv"])
def test_empty_zstd_is_empty(tmp_path: Path, ending: str) -> None:
    (tmp_path / f"a{ending}.zst").touch()
    assert read(str(tmp_path / f"a{ending}.zst")) == []


def test_zstd_of_several_frames_is_read_to_its_end(tmp_path: Path) -> None:
    """As parallel compressors and `cat` write it."""
    first, second = (Path(write(tmp_path / f"{n}.txt.zst", f"w{n}\n")) for n in (1, 2))
    (tmp_path / "both.txt.zst").write_bytes(first.read_bytes() + second.read_bytes())
    assert read(str(tmp_path / "both.txt.zst")) == ["w1", "w2"]


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())], ids=str
)
def test_parquet_gives_the_documents_of_text(tmp_path: Path, kind: pa.DataType) -> None:
    """In several row groups and batches, whatever the type of its text, beside columns that are not read."""
    documents = [*DOCUMENTS[:-1], " ", ""] * 100
    table = pa.table({"number": range(800), "text": pa.array(documents).cast(kind), "o": [{"text": "no"}] * 800})
    path = tmp_path / "a.parquet"
    parquet.write_table(table, path, row_group_size=300)
    assert read(str(path)) == DOCUMENTS[:-1] * 100


def test_windows_ends_in_parquet_are_data(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.parquet", pa.table({"text": ["one\r\ntwo"]}))) == ["one\r\ntwo"]


@pytest.mark.parametrize(
    "kind",
    [pa.list_(pa.int64()), pa.large_list(pa.int32()), pa.list_(pa.uint16())],
    ids=str,
)
def test_ids_of_parquet_are_documents(tmp_path: Path, kind: pa.DataType) -> None:
    path = write(tmp_path / "a.parquet", pa.table({"text": ["no"] * 4, "ids": pa.array([*IDS, []], type=kind)}))
    documents = read(path, text_column="ids", key="data.val")
    assert documents == IDS
    assert all(isinstance(ids, TokenIds) and {type(token) for token in ids} == {int} for ids in documents)
    assert documents[1].place == f"data.val: column 'ids' in record 2 of '{path}'"


@pytest.mark.parametrize("packed", ["", ".zst"])
def test_ids_of_json_lines_are_documents(tmp_path: Path, packed: str) -> None:
    path = write(tmp_path / f"a.jsonl{packed}", of_json([*IDS, []], "ids"))
    documents = read(path, text_column="ids")
    assert documents == IDS
    assert documents[2].place == f"data.train: column 'ids' in line 3 of '{path}'"


@pytest.mark.parametrize(
    ("value", "got"),
    [
        ({"a": 1}, r"got \{'a': 1\}"),
        (True, "got True"),
        (7.5, "got 7.5"),
        ([1, 2.0], "got a list with 2.0"),
        ([1, True], "got a list with True"),
        ([1, None], "got a list with None"),
        (["one"], "got a list with 'one'"),
        ([[1], [2]], r"got a list with \[1\]"),
    ],
)
def test_what_is_no_document_is_an_error(tmp_path: Path, value: Any, got: str) -> None:
    path = write(tmp_path / "a.jsonl", of_json(["fine", value]))
    with pytest.raises(
        ValueError, match=f"column 'text' in line 2 of '.*' must be text or a list of token ids, {got}$"
    ):
        read(path)


@pytest.mark.parametrize(
    ("values", "record", "got"),
    [
        (["a"] * 300 + [None], 301, "got None"),
        ([1, 2], 1, "got 1"),
        ([b"a"], 1, "got b'a'"),
        ([[1], None], 2, "got None"),
        ([[1], [2, None]], 2, "got a list with None"),
        ([[0.5]], 1, "got a list with 0.5"),
        ([{"a": 1}], 1, "got {'a': 1}"),
    ],
)
def test_wrong_record_of_parquet_is_named_by_its_number(
    tmp_path: Path, values: list[Any], record: int, got: str
) -> None:
    path = write(tmp_path / "a.parquet", pa.table({"text": values}))
    expected = f"data.val: column 'text' in record {record} of '{path}' must be text or a list of token ids, {got}"
    assert message_of(path, key="data.val") == expected


def test_half_of_a_surrogate_pair_is_an_error(tmp_path: Path) -> None:
    """JSON can write one; a whole pair is a character."""
    path = write(tmp_path / "a.jsonl", '{"text": "\\ud83d\\ude00"}\n{"text": "cut \\ud83d"}\n')
    with pytest.raises(ValueError, match=r"in line 2 of '.*' must be text without lone surrogates, got 'cut \\ud83d'"):
        read(path)
    assert next(TextSource((path,)).documents()) == "\N{GRINNING FACE}"


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("a.csv", "id,txt\n1,one\n", "line 1 of '{path}'"),
        ("a.csv.zst", "id,txt\n1,one\n", "line 1 of '{path}'"),
        ("a.tsv", "\nid\ttxt\n1\tone\n", "line 2 of '{path}'"),
        ("a.parquet", pa.table({"id": [], "txt": []}), "'{path}'"),
        ("a.jsonl", '\n{"id": 1, "txt": "one"}\n', "line 2 of '{path}'"),
    ],
)
def test_missing_column_is_named_with_those_there_are(tmp_path: Path, name: str, content: Any, place: str) -> None:
    path = write(tmp_path / name, content)
    start = f"data.train: {place.format(path=path)} must have the column "
    assert message_of(path) == f"{start}'text' (data.text_column), got id, txt; txt?"
    assert message_of(path, text_column="wiki") == f"{start}'wiki' (data.text_column), got id, txt"


def test_column_that_is_there_twice_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "text,text\none,two\n")
    assert message_of(path).endswith("must have the column 'text' once (data.text_column), got text, text")
    columns = pa.Table.from_arrays([pa.array(["one"])] * 2, ["text", "text"])
    path = write(tmp_path / "a.parquet", columns)
    assert message_of(path).endswith("must have the column 'text' once (data.text_column), got text, text")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "text,id\none,1\n\na, b,2\n",
            "line 4 of '{path}' must have 2 fields, as the first line has, got 3 (fields that hold ','",
        ),
        ("text,id\none,1\ntwo\n", "line 3 of '{path}' must have 2 fields, as the first line has, got 1"),
        ('text,id\n"one\ntwo",1\n"three"x,2\n', "line 4 of '{path}' must be a row of CSV"),
        ('text,id\none,1\n"two,2\nthree,3\n', "line 3 of '{path}' must be a row of CSV"),
    ],
)
def test_broken_row_of_csv_is_named_by_its_line(tmp_path: Path, content: str, message: str) -> None:
    path = write(tmp_path / "a.csv", content)
    assert message_of(path).startswith("data.train: " + message.format(path=path))


@pytest.mark.parametrize("ending", [*PLAIN, ".csv.gz", ".txt.zst"])
def test_other_encodings_are_an_error(tmp_path: Path, ending: str) -> None:
    path = write(tmp_path / f"a{ending}", b"text\ncaf\xe9 noir\n")
    assert message_of(path).startswith(f"data.train must be readable as UTF-8 text, got '{path}' ('utf-8' codec")


@pytest.mark.parametrize("ending", PLAIN)
@pytest.mark.parametrize("packed", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "other", "middle", "start"])
def test_damaged_compression_is_an_error(tmp_path: Path, ending: str, packed: str, damage: str) -> None:
    numbers = [str(n * 7919 % 10007) for n in range(20_000)]
    path = tmp_path / f"a{ending}{packed}"
    whole = Path(write(path, PLAIN[ending](numbers))).read_bytes()
    half = len(whole) // 2
    damaged = {"cut": whole[:half], "other": b"plain text\n", "middle": whole[:half] + bytes(64) + whole[half + 64 :]}
    damaged["start"] = whole[:10] + b"\xff" * 50
    path.write_bytes(damaged[damage])
    assert message_of(str(path)).startswith("data.train")


@pytest.mark.parametrize("cut", [0, 3, 400])
def test_damaged_parquet_is_an_error(tmp_path: Path, cut: int) -> None:
    path = Path(write(tmp_path / "a.parquet", pa.table({"text": DOCUMENTS})))
    path.write_bytes(path.read_bytes()[:cut])
    assert message_of(str(path)).startswith(f"data.train must be readable as Parquet, got '{path}' (")


def test_parquet_that_is_damaged_within_is_an_error(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a.parquet", pa.table({"text": [f"document {n}" for n in range(5000)]})))
    content = bytearray(path.read_bytes())
    content[4:4000] = bytes(3996)
    path.write_bytes(content)
    assert message_of(str(path)).startswith(f"data.train must be readable as Parquet, got '{path}' (")


def test_json_that_python_refuses_is_named_by_its_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "a"}\n{"text": "b", "n": ' + "1" * 5000 + "}\n")
    assert message_of(path).startswith(f"data.train: line 2 of '{path}' must be JSON, got ")


def test_plain_text_needs_neither_datasets_nor_pyarrow(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl.gz", of_json(["one"]))
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('datasets', 'pyarrow')))\n"
        "from lit_encoders.data.sources import TextSource\n"
        f"source = TextSource(({path!r},)); print(source.digest() != '', *source.documents())"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True one\n"
