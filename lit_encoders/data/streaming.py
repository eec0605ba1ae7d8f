"""Text that is not tokenised ahead: read window by window while a run goes on, and gone on with from any window.

A window is a few ten thousand documents. Each is tokenised once into a store of its own, while the one before is
trained on, and removed when it is no longer needed; within it documents are shuffled and packed as always. What a
resume needs is the reader's own state at the window's start, which `datasets` gives and takes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from lit_encoders.data.packs import BEGINNING, IntArray, Pack, Plan, Position, pack_window
from lit_encoders.data.sources import TextSource
from lit_encoders.data.tables import HUB, hub_name
from lit_encoders.data.tokens import Affixes, Document, StoreMeta, TokenStore, write_stores
from lit_encoders.objectives.hashing import Purpose, permute, single_key

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WINDOW_DOCUMENTS = 65_536
# A window of long documents ends earlier: it has to fit the memory while it is planned, and the disk.
WINDOW_CHARACTERS = 256_000_000
_ABOUT = "window.json"
_WAIT_SECONDS = 0.05


@dataclass(frozen=True)
class Reader:
    """Documents that can be read from a state on.

    Attributes:
        rows: yields the documents from a state on (None is the beginning), each with the state behind it, in plain
            types; blank ones too.
        key: the setting that names them, for messages.
    """

    rows: Callable[[Any], Iterator[tuple[Document, Callable[[], Any]]]]
    key: str


@dataclass(frozen=True)
class WindowFolder:
    """Where the windows of a stream lie on this machine.

    Attributes:
        root: folder of the stream.
    """

    root: Path

    def path(self, window: int) -> Path:
        """Folder of a window."""
        return self.root / f"window-{window:06d}"

    def about(self, window: int) -> dict[str, Any]:
        """Number of documents, whether the stream ends with it, and the reader's state behind it."""
        about: dict[str, Any] = json.loads((self.path(window) / _ABOUT).read_text(encoding="utf-8"))
        return about

    def exists(self, window: int) -> bool:
        """Whether a window is there, whole."""
        return (self.path(window) / _ABOUT).is_file()

    def write(
        self,
        window: int,
        reader: Reader,
        state: Any,
        tokenizer: PreTrainedTokenizerBase,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Read and tokenise a window, or leave nothing behind.

        Args:
            window: its number.
            reader: of the documents.
            state: of the reader at the window's start.
            tokenizer: of the model.
            stopped: asked at each document whether to give up.

        Raises:
            InterruptedError: it was stopped.
        """
        shutil.rmtree(self.path(window), ignore_errors=True)
        after = state
        count = 0
        ended = True

        def documents() -> Iterator[Document]:
            nonlocal after, count, ended
            characters = 0
            behind: Callable[[], Any] | None = None
            for document, state_behind in reader.rows(state):
                behind = state_behind
                if document and not (isinstance(document, str) and document.isspace()):
                    yield document
                if stopped():
                    raise InterruptedError("nobody waits for this window any more")
                count += 1
                characters += len(document)
                if count == WINDOW_DOCUMENTS or characters >= WINDOW_CHARACTERS:
                    ended = False
                    break
            after = None if ended or behind is None else behind()

        beside = self.root / f".window-{window:06d}"
        shutil.rmtree(beside, ignore_errors=True)
        write_stores(documents(), tokenizer, lambda _: "train", ("train",), beside)
        about = {"rows": count, "ended": ended, "after": after}
        (beside / _ABOUT).write_text(json.dumps(about), encoding="utf-8")
        os.replace(beside, self.path(window))


@dataclass(frozen=True)
class StreamStore:
    """The documents of a stream; the windows of those asked for have to be there.

    Attributes:
        folder: of the windows.
    """

    folder: WindowFolder

    def _store(self, window: int) -> TokenStore:
        return _open_window(self.folder.path(window) / "train")

    @property
    def meta(self) -> StoreMeta:
        """Figures of the first window."""
        return self._store(0).meta

    def __len__(self) -> int:
        raise TypeError("a stream has no length")

    def lengths(self, documents: IntArray) -> IntArray:
        """Content tokens of each document, (N,)."""
        found = np.empty(len(documents), np.int64)
        windows = documents // WINDOW_DOCUMENTS
        for window in np.unique(windows).tolist():
            of_window = windows == window
            found[of_window] = self._store(window).lengths(documents[of_window] - window * WINDOW_DOCUMENTS)
        return found

    def tokens(self, document: int, start: int, stop: int) -> IntArray:
        """Content ids ``start:stop`` of one document."""
        window, number = divmod(document, WINDOW_DOCUMENTS)
        return self._store(window).tokens(number, start, stop)

    def num_eligible(self, document: int) -> int:
        """Tokens of a document that are not special ids."""
        window, number = divmod(document, WINDOW_DOCUMENTS)
        return self._store(window).num_eligible(number)


@lru_cache(maxsize=4)
def _open_window(path: Path) -> TokenStore:
    return TokenStore(path)


class StreamPlan(Plan):
    """The sequence of packs of a stream, planned window by window.

    A document's number is its place in the window plus ``window * WINDOW_DOCUMENTS``.

    Args:
        reader: of the documents.
        tokenizer: of the model.
        folder: where windows are kept on this machine.
        affixes: special ids around a document.
        slots: tokens of a pack.
        sequence_length: longest piece of a document, at most ``slots``.
        seed: of the order.
        writes: whether this process reads and tokenises; the others of a machine wait for what it writes.
    """

    def __init__(
        self,
        reader: Reader,
        tokenizer: PreTrainedTokenizerBase,
        folder: Path,
        affixes: Affixes,
        slots: int,
        sequence_length: int,
        seed: int,
        writes: bool = True,
    ) -> None:
        self.reader, self.tokenizer, self.seed, self.writes = reader, tokenizer, seed, writes
        self.folder = WindowFolder(folder)
        self.store = StreamStore(self.folder)
        self.affixes, self.slots, self.sequence_length = affixes, slots, sequence_length
        # The reader's state at the start of each window that is known.
        self.states: dict[int, Any] = {0: None}
        self.windows_read = 0
        self._ahead: tuple[int, Future[None]] | None = None
        # The window before the one at hand, and the stream's last one once it is known.
        self._before = 0
        self._last_window: int | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="next-window")
        self._closed = threading.Event()
        self.window = lru_cache(maxsize=2)(self._plan_window)

    @property
    @override
    def beginning(self) -> Position:
        return BEGINNING

    @override
    def first_packs(self) -> list[Pack]:
        return self.window(0, 0)

    def first_store(self) -> TokenStore:
        """The documents of the first window, read now if they are not there."""
        self._have(0)
        return _open_window(self.folder.path(0) / "train")

    @override
    def placed(self, start: Position | None = None) -> Iterator[tuple[Position, Pack]]:
        epoch, window, number = start or BEGINNING
        while True:
            for pack in self.window(epoch, window)[number:]:
                yield pack.here, pack
            number, window = 0, window + 1
            if self._last_window == window - 1:
                window, epoch = 0, epoch + 1

    @override
    def epochs_at(self, place: Position) -> float:
        """Whole passes over the stream at a place: how long the one at hand is, is not known."""
        return float(place.epoch)

    def _plan_window(self, epoch: int, window: int) -> list[Pack]:
        self._have(window)
        about = self.folder.about(window)
        count = len(_open_window(self.folder.path(window) / "train"))
        if count == 0 and window == 0 and about["ended"]:
            raise ValueError(f"{self.reader.key} must hold at least one document that is not blank, got none")
        if about["ended"]:
            self._last_window = window
        self._begin(0 if about["ended"] else window + 1, window)
        documents = np.arange(count, dtype=np.int64)
        order = permute(documents, count, single_key(self.seed, Purpose.ORDER, epoch, window)) if count else documents
        return pack_window(self, order + window * WINDOW_DOCUMENTS, epoch, window, self.seed)

    def _have(self, window: int) -> None:
        """Wait until a window is there; read it now if nobody has begun to."""
        if not self.writes:
            while not self.folder.exists(window):
                time.sleep(_WAIT_SECONDS)
        else:
            if self._ahead is not None and self._ahead[0] == window:
                self._ahead[1].result()
                self._ahead = None
            if not self.folder.exists(window):
                self._read(window)
        self.states[window + 1] = self.folder.about(window)["after"]

    def _begin(self, window: int, now: int) -> None:
        """Begin to read the next window while one is trained on, and forget those that are over."""
        if not self.writes or (self._ahead is not None and self._ahead[0] == window):
            return
        for path in self.folder.root.glob("window-*"):
            # Workers and other ranks may still be in the one before.
            if int(path.name.rpartition("-")[2]) not in (self._before, now, window):
                shutil.rmtree(path, ignore_errors=True)
        self._before = now
        if not self.folder.exists(window):
            self._ahead = (window, self._pool.submit(self._read, window))

    def _read(self, window: int) -> None:
        self.windows_read += 1
        self.folder.write(window, self.reader, self.states[window], self.tokenizer, self._closed.is_set)

    def close(self) -> None:
        """Stop reading ahead."""
        self._closed.set()
        self._pool.shutdown(cancel_futures=True)

    def state(self, place: Position) -> dict[str, Any]:
        """What a resume at a place needs beside it: the reader's state at the start of its window."""
        return {"window": place.window, "reader": self.states.get(place.window)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave; windows that lie there are of another place, or of this one."""
        self.states = {0: None, int(state["window"]): state["reader"]}
        self.window.cache_clear()


# Kinds of local files, as `datasets` names what reads them, with its settings.
_BUILDERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    ".txt": ("text", {}),
    ".text": ("text", {}),
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".ndjson": ("json", {}),
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".parquet": ("parquet", {}),
}
_PACKED = (".gz", ".zst", ".xz", ".bz2")


def stream_reader(source: TextSource) -> Reader:
    """Read a source as a stream, through `datasets`: local files of one kind, or one dataset of the hub.

    Raises:
        ValueError: it is neither, or lacks the column.
    """
    from datasets import load_dataset

    if len(source.files) == 1 and source.files[0].startswith(HUB):
        name, config, split = hub_name(source.files[0], source.key)
        dataset = load_dataset(name, config, split=split, streaming=True)
    else:
        paths = source.paths()
        kinds = {_kind(path) for path in paths}
        if len(kinds) != 1 or None in kinds or len(paths) < len(source.files):
            raise ValueError(
                f"{source.key} must be files of one kind ({', '.join(_BUILDERS)}) or one hub:OWNER/NAME where "
                f"data.streaming is on, got {list(source.files)}"
            )
        builder, settings = _BUILDERS[str(kinds.pop())]
        if builder == "text":
            settings = {"sample_by": source.sample_by}
        files = [str(path) for path in paths]
        dataset = load_dataset(builder, data_files=files, split="train", streaming=True, **settings)
    column = "text" if dataset.features and list(dataset.features) == ["text"] else source.text_column

    def rows(state: Any) -> Iterator[tuple[Document, Callable[[], Any]]]:
        # A fresh copy: the state belongs to the object.
        stream = dataset.select_columns([column])
        if state is not None:
            stream.load_state_dict(state)
        for number, row in enumerate(stream):
            if column not in row:
                raise ValueError(f"{source.key} must have a column {column!r}, got {sorted(row)}")
            yield source.checked(row[column], f"row {number} of a window"), stream.state_dict

    return Reader(rows, source.key)


def _kind(path: Path) -> str | None:
    endings = [ending for ending in path.suffixes if ending not in _PACKED]
    return endings[-1] if endings and endings[-1] in _BUILDERS else None


def stream_digest(source: TextSource) -> str:
    """What a stream is, as far as it can be said without reading it: names, and sizes of local files."""
    facts: list[Any] = [source.text_column, source.sample_by, WINDOW_DOCUMENTS, WINDOW_CHARACTERS]
    facts += [name for name in source.files if name.startswith(HUB)]
    facts += [(str(path.resolve()), path.stat().st_size) for path in source.paths()]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
