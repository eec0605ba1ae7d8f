"""Files of every known ending, read in a stream: each document with the place where it stands.

A reader yields what the column holds, whatever that is; whether it can be a document is checked in one place, by
`TextSource`.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, Protocol, cast

SampleBy = Literal["line", "paragraph", "document"]
# Where it stands, for messages, and the value.
Placed = tuple[str, Any]

ROWS = 256  # read at a time, of tables
_BUFFER = 1 << 20  # bytes
# csv refuses fields above 128 KiB unless told otherwise; the most that a C long holds on every system.
_LONGEST_FIELD = 2**31 - 1


@dataclass(frozen=True)
class Reading:
    """How a column is read, and for messages the settings that name the files and the column."""

    text_column: str
    sample_by: SampleBy
    key: str
    column_key: str = "data.text_column"

    def check_columns(self, columns: list[str], place: str) -> None:
        """Refuse a table that lacks the column, or has it twice."""
        count = columns.count(self.text_column)
        if count == 1:
            return
        once = " once" if count else ""
        near = [] if count else get_close_matches(self.text_column, columns, n=1)
        raise ValueError(
            f"{self.key}: {place} must have the column {self.text_column!r}{once} ({self.column_key}), "
            f"got {', '.join(columns) or 'no columns'}" + (f"; {near[0]}?" if near else "")
        )


class Input(Protocol):
    """One thing that holds documents."""

    @property
    def path(self) -> Path | None:
        """The file or folder; None if it is on the hub."""
        ...

    def values(self, reading: Reading) -> Iterator[Placed]:
        """Yield every value of the text column."""
        ...

    def digest(self, reading: Reading) -> str:
        """Hash the content and the kind: equal digests give equal documents."""
        ...


@dataclass(frozen=True)
class TextFile:
    """A file whose ending says how it is read."""

    path: Path

    def is_known(self) -> bool:
        """Whether there is a reader for the ending."""
        ending, packed = _ending(self.path)
        return ending in READERS and not (packed and ending in _PACKED_ALREADY)

    def is_plain(self) -> bool:
        """Whether it is text without columns."""
        return READERS[_ending(self.path)[0]] is read_text

    def values(self, reading: Reading) -> Iterator[Placed]:
        return READERS[_ending(self.path)[0]](self.path, reading)

    def digest(self, reading: Reading) -> str:
        return hash_files([self.path], "".join(_ending(self.path)), reading.key)


def hash_files(paths: Iterable[Path], kind: str, key: str) -> str:
    """Hash the bytes of files in their order, and what they are read as."""
    total = hashlib.sha256(kind.encode())
    for path in paths:
        try:
            with path.open("rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise ValueError(f"{key} must be readable, got '{path}' ({error.strerror})") from error
    return total.hexdigest()


def one_line(error: BaseException) -> str:
    """What an error says, without line breaks."""
    return " ".join(str(error).split())


def read_text(path: Path, reading: Reading) -> Iterator[Placed]:
    """Yield lines, paragraphs (blank lines between) or the whole file."""
    with _utf8(path, reading.key) as file:
        if reading.sample_by == "document":
            yield f"'{path}'", file.read()
        elif reading.sample_by == "line":
            yield from ((f"'{path}'", line.rstrip("\n")) for line in file)
        else:
            paragraph: list[str] = []
            for line in file:
                if line.isspace():
                    yield f"'{path}'", "".join(paragraph)
                    paragraph = []
                else:
                    paragraph.append(line)
            yield f"'{path}'", "".join(paragraph)


def read_json_lines(path: Path, reading: Reading) -> Iterator[Placed]:
    """Yield the column of every record; blank lines are counted and passed over."""
    with _utf8(path, reading.key) as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            place = f"line {number} of '{path}'"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                reason = getattr(error, "msg", error)
                raise ValueError(f"{reading.key}: {place} must be JSON, got {line.strip()[:60]!r} ({reason})") from None
            if not isinstance(record, dict):
                raise ValueError(
                    f"{reading.key}: {place} must have the column {reading.text_column!r} ({reading.column_key}), "
                    f"got {type(record).__name__}"
                )
            if reading.text_column not in record:
                reading.check_columns(list(record), place)
            yield place, record[reading.text_column]


def read_csv(path: Path, reading: Reading, delimiter: str = ",") -> Iterator[Placed]:
    """Yield the column of every row; the first row names the columns. Fields that hold line breaks stand in quotes."""
    with _utf8(path, reading.key) as file:
        rows = _rows(file, delimiter, path, reading.key)
        place, header = next(rows, ("", None))
        if header is None:
            return
        reading.check_columns(header, place)
        column = header.index(reading.text_column)
        for place, row in rows:
            if len(row) != len(header):
                raise ValueError(
                    f"{reading.key}: {place} must have {len(header)} fields, as the first line has, got {len(row)} "
                    f"(fields that hold {delimiter!r} stand in quotes)"
                )
            yield place, row[column]


def _rows(file: IO[str], delimiter: str, path: Path, key: str) -> Iterator[tuple[str, list[str]]]:
    reader = csv.reader(file, delimiter=delimiter, strict=True)
    while True:
        place = f"line {reader.line_num + 1} of '{path}'"
        # The limit is the whole process's, so it is changed only while a row is read.
        limit = csv.field_size_limit(_LONGEST_FIELD)
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise ValueError(
                f"{key}: {place} must be a row of CSV, with whole quotes, got an error ({error})"
            ) from None
        finally:
            csv.field_size_limit(limit)
        if row is None:
            return
        if row:
            yield place, row


def read_parquet(path: Path, reading: Reading) -> Iterator[Placed]:
    """Yield the column of every record."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        # Without both settings a whole row group stands in memory.
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER) as file:
            reading.check_columns(file.schema_arrow.names, f"'{path}'")
            batches = file.iter_batches(ROWS, columns=[reading.text_column])
            yield from placed((batch.column(0) for batch in batches), f"'{path}'")
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise ValueError(f"{reading.key} must be readable as Parquet, got '{path}' ({one_line(error)})") from error


def placed(columns: Iterable[Any], name: str) -> Iterator[Placed]:
    """Yield the values of a column that comes in pieces of Arrow, with their numbers from 1."""
    values = (value for column in columns for value in column.to_pylist())
    for number, value in enumerate(values, start=1):
        yield f"record {number} of {name}", value


Reader = Callable[[Path, Reading], Iterator[Placed]]
READERS: Mapping[str, Reader] = {
    **dict.fromkeys((".txt", ".text", ".md"), read_text),
    **dict.fromkeys((".jsonl", ".json", ".ndjson"), read_json_lines),
    ".csv": read_csv,
    ".tsv": partial(read_csv, delimiter="\t"),
    ".parquet": read_parquet,
}
_PACKED_ALREADY = {".parquet"}
ENDINGS = f"{', '.join(sorted(READERS))} (all but {', '.join(_PACKED_ALREADY)} may have .gz or .zst after it)"


def _ending(path: Path) -> tuple[str, str]:
    """The ending that says how to read, and that of the compression around it or nothing."""
    last = path.suffix.lower()
    return (path.with_suffix("").suffix.lower(), last) if last in (".gz", ".zst") else (last, "")


@contextmanager
def _utf8(path: Path, key: str) -> Iterator[IO[str]]:
    """Open a file of text; every kind of line end is read as ``\\n``, and a byte order mark is no part of the text."""
    try:
        with _open(path) as file:
            yield file
    except (UnicodeDecodeError, EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{key} must be readable as UTF-8 text, got '{path}' ({one_line(error)})") from error


def _open(path: Path) -> IO[str]:
    packed = _ending(path)[1]
    if packed == ".gz":
        return cast(IO[str], gzip.open(path, "rt", encoding="utf-8-sig"))
    if packed == ".zst":
        import pyarrow as pa

        return io.TextIOWrapper(pa.input_stream(str(path), compression="zstd"), encoding="utf-8-sig")
    return path.open(encoding="utf-8-sig")
