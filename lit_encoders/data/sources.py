"""Documents out of files: plain text and JSON lines, gzipped or not, and the examples."""

from __future__ import annotations

import glob
import gzip
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, cast, get_args

from lit_encoders.data.examples import PREFIX, find_example

SampleBy = Literal["line", "paragraph", "document"]

_TEXT = {".txt", ".text", ".md"}
_JSON_LINES = {".jsonl", ".json", ".ndjson"}


@dataclass(frozen=True)
class TextSource:
    """Where documents come from.

    Args:
        files: paths, globs or ``example:NAME``.
        text_column: key of the text in JSON lines.
        sample_by: what one document of a plain text file is: a line, a paragraph (blank lines between), or the file.
        key: the setting that the user wrote, for messages.
    """

    files: tuple[str, ...]
    text_column: str = "text"
    sample_by: SampleBy = "line"
    key: str = "data.train"

    def paths(self) -> list[Path]:
        """Resolve names into files that exist, in a fixed order.

        Raises:
            ValueError: a file is missing or of no known kind, or an example is not installed.
        """
        paths: list[Path] = []
        for name in self.files:
            if name.startswith(PREFIX):
                paths.append(find_example(name)[1])
                continue
            pattern = glob.has_magic(name) and not Path(name).is_file()
            matches = sorted(glob.glob(name, recursive=True)) if pattern else [name]
            files = [Path(match) for match in matches if Path(match).is_file()]
            if not files:
                raise ValueError(f"{self.key} must name files that exist, got {name!r}")
            for file in files:
                if _kind(file) not in _TEXT | _JSON_LINES:
                    known = ", ".join(sorted(_TEXT | _JSON_LINES))
                    raise ValueError(f"{self.key} must end in one of {known} (or one of these and .gz), got '{file}'")
            paths += files
        return paths

    def digest(self) -> str:
        """Hash what the documents depend on: the files' bytes and how they are read."""
        total = hashlib.sha256(repr((self.text_column, self.sample_by)).encode())
        for path in self.paths():
            with path.open("rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
        return total.hexdigest()

    def documents(self) -> Iterator[str]:
        """Yield every document that is not blank.

        Raises:
            ValueError: a line of JSON is broken, or lacks the column; the message has the file and the line's number.
        """
        for name in self.files:
            if name.startswith(PREFIX):
                example, path = find_example(name)
                if example.documents is None:
                    raise ValueError(f"{self.key} must name a text, got the model {name!r}")
                yield from example.documents(path)
                continue
            single = TextSource((name,), self.text_column, self.sample_by, self.key)
            for path in single.paths():
                yield from (text for text in self._read(path) if text and not text.isspace())

    def _read(self, path: Path) -> Iterator[str]:
        try:
            with _open(path) as file:
                yield from self._json_lines(path, file) if _kind(path) in _JSON_LINES else self._text(file)
        except (UnicodeDecodeError, EOFError, OSError) as error:
            raise ValueError(f"{self.key} must be readable as UTF-8 text, got '{path}' ({error})") from error

    def _json_lines(self, path: Path, file: IO[str]) -> Iterator[str]:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{self.key}: line {number} of '{path}' must be JSON, got {line.strip()[:60]!r} ({error.msg})"
                ) from None
            if not isinstance(record, dict) or self.text_column not in record:
                columns = ", ".join(record) if isinstance(record, dict) else type(record).__name__
                raise ValueError(
                    f"{self.key}: line {number} of '{path}' must have the column {self.text_column!r} "
                    f"(data.text_column), got {columns}"
                )
            text = record[self.text_column]
            if not isinstance(text, str):
                raise ValueError(
                    f"{self.key}: column {self.text_column!r} in line {number} of '{path}' must be text, "
                    f"got {text!r:.60}"
                )
            yield text

    def _text(self, file: IO[str]) -> Iterator[str]:
        if self.sample_by == "document":
            yield file.read()
        elif self.sample_by == "line":
            yield from (line.rstrip("\n") for line in file)
        else:
            paragraph: list[str] = []
            for line in file:
                if line.isspace():
                    yield "".join(paragraph)
                    paragraph = []
                else:
                    paragraph.append(line)
            yield "".join(paragraph)


def as_source(files: str | Sequence[str], text_column: str, sample_by: SampleBy, key: str) -> TextSource:
    """Make a source of one name or several."""
    if sample_by not in get_args(SampleBy):
        raise ValueError(f"data.sample_by must be one of {', '.join(get_args(SampleBy))}, got {sample_by!r}")
    names = (files,) if isinstance(files, str) else tuple(files)
    return TextSource(names, text_column, sample_by, key)


def in_split(text: str, share: float) -> bool:
    """Whether a document belongs to a share of the corpus, by its content: equal texts fall on the same side.

    >>> [in_split("same", 0.5) for _ in range(2)] in ([True, True], [False, False])
    True
    """
    draw = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
    return draw < share * 2.0**64


def _kind(path: Path) -> str:
    return path.with_suffix("").suffix.lower() if path.suffix == ".gz" else path.suffix.lower()


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return cast(IO[str], gzip.open(path, "rt", encoding="utf-8-sig"))
    # "-sig": a byte order mark is no part of the first document.
    return path.open(encoding="utf-8-sig")
