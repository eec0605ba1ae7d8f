"""Documents out of files, saved datasets, the hub and the examples: text, or ids that were tokenised before."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from lit_encoders.data.examples import PREFIX, find_example
from lit_encoders.data.formats import ENDINGS, Input, Placed, Reading, TextFile, hash_files
from lit_encoders.data.formats import SampleBy as SampleBy
from lit_encoders.data.tables import HUB, HubDataset, SavedDataset
from lit_encoders.data.tokens import Document, TokenIds


@dataclass(frozen=True)
class TextSource:
    """Where documents come from.

    Args:
        files: paths or globs; folders that `datasets` saved, as ``FOLDER`` or ``FOLDER#SPLIT``; ``hub:OWNER/NAME`` or
            ``hub:OWNER/NAME:CONFIG#SPLIT``; ``example:NAME``.
        text_column: column of the documents in everything that has columns: text, or lists of token ids.
        sample_by: what one document of a plain text file is: a line, a paragraph (blank lines between), or the file.
        key: the setting that the user wrote, for messages.
    """

    files: tuple[str, ...]
    text_column: str = "text"
    sample_by: SampleBy = "line"
    key: str = "data.train"

    def paths(self) -> list[Path]:
        """Resolve names into files and folders that exist, in a fixed order; what is on the hub has none.

        Raises:
            ValueError: a file is missing or of no known kind, or an example is not installed.
        """
        return [found.path for found in self._inputs() if found.path is not None]

    def digest(self) -> str:
        """Hash what the documents depend on: the content of the files, and how they are read."""
        total = hashlib.sha256(repr((self.text_column, self.sample_by)).encode())
        for found in self._inputs():
            total.update(found.digest(self._reading).encode())
        return total.hexdigest()

    def documents(self) -> Iterator[Document]:
        """Yield every document that is not empty or blank: text, or its ids.

        Raises:
            ValueError: something cannot be read, lacks the column, or is no document; the message has the file and the
                number of the line or record.
        """
        for found in self._inputs():
            for place, value in found.values(self._reading):
                document = self.checked(value, place)
                if document and not (isinstance(document, str) and document.isspace()):
                    yield document

    def records(self, columns: Mapping[str, str]) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Yield the values of several columns of every record, blank ones too, with the place where they stand.

        Args:
            columns: name of each column, by the setting that names it.

        Raises:
            ValueError: something cannot be read, or lacks a column.
        """
        for found in self._inputs():
            if isinstance(found, _ExampleText) or (isinstance(found, TextFile) and found.is_plain()):
                # Of plain text every column would be the line.
                setting, column = next(iter(columns.items()))
                raise ValueError(
                    f"{self.key}: '{found.path}' must have the column {column!r} ({setting}), got plain text"
                )
            readings = [Reading(column, self.sample_by, self.key, setting) for setting, column in columns.items()]
            for cells in zip(*(found.values(reading) for reading in readings), strict=True):
                yield cells[0][0], tuple(value for _, value in cells)

    @property
    def _reading(self) -> Reading:
        return Reading(self.text_column, self.sample_by, self.key)

    def _inputs(self) -> list[Input]:
        inputs: list[Input] = []
        for name in self.files:
            if name.startswith(PREFIX):
                inputs.append(self._example(name))
            elif name.startswith(HUB):
                inputs.append(HubDataset(name))
            else:
                inputs += self._local(name)
        return inputs

    def _example(self, name: str) -> Input:
        example, path = find_example(name)
        if example.documents is None:
            raise ValueError(f"{self.key} must name a text, got the model {name!r}")
        return _ExampleText(name, path, example.documents)

    def _local(self, name: str) -> list[Input]:
        folder, mark, split = name.rpartition("#")
        if mark and not Path(name).exists() and SavedDataset(Path(folder)).is_known():
            return [SavedDataset(Path(folder), split)]
        pattern = glob.has_magic(name) and not Path(name).exists()
        inputs: list[Input] = []
        for path in map(Path, sorted(glob.glob(name, recursive=True)) if pattern else [name]):
            if path.is_file() and not TextFile(path).is_known():
                raise ValueError(f"{self.key} must end in one of {ENDINGS}, got '{path}'")
            if path.is_file():
                inputs.append(TextFile(path))
            elif SavedDataset(path).is_known():
                inputs.append(SavedDataset(path))
        if not inputs:
            hint = " (a folder that `save_to_disk` did not write)" if Path(name).is_dir() else ""
            raise ValueError(f"{self.key} must name files that exist, got {name!r}{hint}")
        return inputs

    def checked(self, value: Any, place: str) -> Document:
        """Take a value as a document, or say what it is instead.

        Args:
            value: of the column.
            place: where it stands, for messages.

        Raises:
            ValueError: it is no document.
        """
        where = f"{self.key}: column {self.text_column!r} in {place}"
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                # JSON can write halves of surrogate pairs, which no tokenizer takes.
                raise ValueError(f"{where} must be text without lone surrogates, got {value!a:.60}") from None
            return value
        if not isinstance(value, list):
            raise ValueError(f"{where} must be text or a list of token ids, got {value!r:.60}")
        # True and False are integers to Python, but no ids.
        for item in value:
            if type(item) is not int:
                raise ValueError(f"{where} must be text or a list of token ids, got a list with {item!r:.60}")
        return TokenIds(value, where)


@dataclass(frozen=True)
class _ExampleText:
    name: str
    path: Path
    read: Callable[[Path], Iterator[str]]

    def values(self, reading: Reading) -> Iterator[Placed]:
        return ((f"'{self.name}'", text) for text in self.read(self.path))

    def digest(self, reading: Reading) -> str:
        files = [self.path] if self.path.is_file() else sorted(p for p in self.path.rglob("*") if p.is_file())
        return hash_files(files, self.name, reading.key)


def as_source(files: str | Sequence[str], text_column: str, sample_by: SampleBy, key: str) -> TextSource:
    """Make a source of one name or several."""
    if sample_by not in get_args(SampleBy):
        raise ValueError(f"data.sample_by must be one of {', '.join(get_args(SampleBy))}, got {sample_by!r}")
    names = (files,) if isinstance(files, str) else tuple(files)
    return TextSource(names, text_column, sample_by, key)


def in_split(document: Document, share: float) -> bool:
    """Whether a document belongs to a share of the corpus, by its content: equal documents fall on the same side.

    >>> [in_split("same", 0.5) for _ in range(2)] in ([True, True], [False, False])
    True
    """
    content = document.encode() if isinstance(document, str) else np.array(document, "<i8").tobytes()
    draw = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())
    return draw < share * 2.0**64
