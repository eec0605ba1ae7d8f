"""The token store: a corpus tokenised once, memory-mapped, keyed by content and tokenizer."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 1
# Of documents, and of their characters and ids: a thousand whole books at once would not fit the memory.
_BATCH = 1000
_BATCH_SIZE = 10_000_000

# Text, or the ids of what stands between a document's special tokens.
Document = str | list[int]


class TokenIds(list[int]):
    """Ids of one document that know where they stand, for messages."""

    def __init__(self, ids: Iterable[int], place: str) -> None:
        super().__init__(ids)
        self.place = place


@dataclass(frozen=True)
class StoreMeta:
    """What a store says of itself; counts are over all its documents.

    Attributes:
        num_documents: documents.
        num_tokens: tokens of their content, special tokens around documents not included.
        num_eligible: of these, how many are not special ids (an unknown token is one).
        num_characters: characters of their text; 0 for documents that came as ids.
        num_literal_specials: documents whose raw text holds a special token's string.
        special_ids: ids that are never targets.
        dtype: of the ids on disk.
        format: version of the layout.
    """

    num_documents: int
    num_tokens: int
    num_eligible: int
    num_characters: int
    num_literal_specials: int
    special_ids: list[int]
    dtype: str
    format: int = FORMAT


class TokenStore:
    """Read access to a tokenised corpus. Cheap to open, to hand to workers, and to read anywhere.

    Args:
        folder: what `write_store` wrote.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meta = StoreMeta(**json.loads((folder / "meta.json").read_text()))
        num = self.meta.num_documents
        self._offsets = _map(folder / "offsets.bin", np.int64, num + 1)
        self._eligible = _map(folder / "eligible.bin", np.int64, num)
        self._tokens = _map(folder / "tokens.bin", np.dtype(self.meta.dtype), self.meta.num_tokens)

    def __reduce__(self) -> tuple[type[TokenStore], tuple[Path]]:
        return TokenStore, (self.folder,)

    def __len__(self) -> int:
        return self.meta.num_documents

    def lengths(self, documents: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Content tokens of each document, (N,)."""
        lengths: npt.NDArray[np.int64] = self._offsets[documents + 1] - self._offsets[documents]
        return lengths

    def tokens(self, document: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Content ids ``start:stop`` of one document."""
        first = int(self._offsets[document])
        return self._tokens[first + start : first + stop].astype(np.int64)

    def share_of(self, token: int, first: int) -> float:
        """Share of one id among the first tokens of the corpus."""
        tokens = self._tokens[:first]
        return float(np.count_nonzero(tokens == token)) / max(1, len(tokens))

    def num_eligible(self, document: int) -> int:
        """Tokens of a document that are not special ids."""
        return int(self._eligible[document])


def _map(path: Path, dtype: npt.DTypeLike, size: int) -> npt.NDArray[Any]:
    # An empty file cannot be mapped.
    return np.memmap(path, dtype=dtype, mode="r", shape=(size,)) if size else np.empty(0, dtype)


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash what a tokenizer does: its vocabulary, rules and special ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.loads(backend.to_str()) if backend is not None else tokenizer.get_vocab()
    for passing in ("truncation", "padding"):  # Settings of the last call, not of the tokenizer.
        rules.pop(passing, None)
    facts = json.dumps([rules, sorted(tokenizer.all_special_ids)], sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()


@dataclass(frozen=True)
class Affixes:
    """Special ids that open and close a document, as its tokenizer sets them."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]


def affixes(tokenizer: PreTrainedTokenizerBase) -> Affixes:
    """Find what the tokenizer puts around one text; a tokenizer that closes nothing gets its end token.

    Raises:
        ValueError: the tokenizer splits a text apart, so that there is no one place for the content.
    """
    probe = "a"
    bare: list[int] = tokenizer(probe, add_special_tokens=False)["input_ids"]
    full: list[int] = tokenizer(probe)["input_ids"]
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            suffix = tuple(full[start + len(bare) :])
            if not suffix and tokenizer.eos_token_id is not None:
                suffix = (tokenizer.eos_token_id,)
            return Affixes(tuple(full[:start]), suffix)
    raise ValueError(f"data.tokenizer must put special tokens before and after a text only, got {full} for {probe!r}")


class _Writer:
    """One store in the making, in a folder of its own until it is whole."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase, size: int) -> None:
        folder.mkdir()
        self.folder = folder
        self.dtype = np.dtype(np.uint16 if size <= 1 << 16 else np.uint32)
        self.files = {name: (folder / f"{name}.bin").open("wb") for name in ("tokens", "offsets", "eligible")}
        self.files["offsets"].write(np.zeros(1, np.int64).tobytes())
        self.special = np.zeros(size, bool)
        self.special[tokenizer.all_special_ids] = True
        self.special_strings = tokenizer.all_special_tokens
        self.counts = dict.fromkeys(("documents", "tokens", "eligible", "characters", "literal_specials"), 0)

    def add(self, documents: list[Document], ids: list[list[int]]) -> None:
        lengths = np.array([len(row) for row in ids], np.int64)
        flat = np.fromiter((token for row in ids for token in row), np.int64, int(lengths.sum()))
        ends = np.cumsum(lengths)
        running = np.concatenate([[0], np.cumsum(~self.special[flat])])
        eligible = (running[ends] - running[ends - lengths]).astype(np.int64)
        self.files["tokens"].write(flat.astype(self.dtype).tobytes())
        self.files["offsets"].write((ends + self.counts["tokens"]).tobytes())
        self.files["eligible"].write(eligible.tobytes())
        self.counts["documents"] += len(ids)
        self.counts["tokens"] += len(flat)
        self.counts["eligible"] += int(eligible.sum())
        texts = [document for document in documents if isinstance(document, str)]
        self.counts["characters"] += sum(map(len, texts))
        self.counts["literal_specials"] += sum(any(s in text for s in self.special_strings) for text in texts)

    def close(self) -> None:
        for file in self.files.values():
            file.close()

    def finish(self) -> None:
        self.close()
        counts = {f"num_{name}": count for name, count in self.counts.items()}
        meta = StoreMeta(**counts, special_ids=np.flatnonzero(self.special).tolist(), dtype=self.dtype.name)
        (self.folder / "meta.json").write_text(json.dumps(asdict(meta)))


def num_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest id; a vocabulary may have gaps, so this is not its length."""
    return 1 + max([*tokenizer.get_vocab().values(), *tokenizer.all_special_ids])


def encode(documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, size: int) -> list[list[int]]:
    """Turn documents into ids of their content; those that are ids already stay as they are.

    Args:
        documents: text, tokenised without special tokens around it, or ids.
        tokenizer: for text.
        size: ids are below this.

    Raises:
        ValueError: an id is out of range; the message has the document's place, if it knows one.
    """
    texts = [document for document in documents if isinstance(document, str)]
    options = {"add_special_tokens": False, "split_special_tokens": True, "return_attention_mask": False}
    encoded = iter(tokenizer(texts, **options, verbose=False)["input_ids"] if texts else [])
    return [next(encoded) if isinstance(document, str) else _in_range(document, size) for document in documents]


def _in_range(ids: list[int], size: int) -> list[int]:
    if ids and not 0 <= min(ids) <= max(ids) < size:
        wrong = next(token for token in ids if not 0 <= token < size)
        place = getattr(ids, "place", "a document")
        raise ValueError(f"{place} must hold ids of the tokenizer, 0 to {size - 1}, got {wrong}")
    return ids


def write_stores(
    texts: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    split: Callable[[Document], str],
    names: tuple[str, ...],
    folder: Path,
) -> None:
    """Tokenise documents into one store per name, or leave nothing behind.

    The string of a special token in raw text becomes ordinary pieces, so it is never the special id. Documents that
    come as ids stay as they are, special ids within them too: those are never eligible. What has no token is dropped.

    Args:
        texts: documents, text or ids; read once, in batches.
        tokenizer: applied without special tokens around the text.
        split: chooses the store of a document.
        names: of the stores; each becomes a subfolder of ``folder``.
        folder: where they will stand; appears only when all are whole.

    Raises:
        ValueError: a document's ids are not the tokenizer's.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Not mkdtemp: others who share the cache must be able to read the store.
    beside = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    beside.mkdir()
    writers: dict[str, _Writer] = {}
    try:
        size = num_ids(tokenizer)
        writers = {name: _Writer(beside / name, tokenizer, size) for name in names}
        for batch in _batches(texts):
            rows: dict[str, tuple[list[Document], list[list[int]]]] = {name: ([], []) for name in names}
            for document, ids in zip(batch, encode(batch, tokenizer, size), strict=True):
                if ids:
                    kept, kept_ids = rows[split(document)]
                    kept.append(document)
                    kept_ids.append(ids)
            for name, (kept, kept_ids) in rows.items():
                writers[name].add(kept, kept_ids)
        for writer in writers.values():
            writer.finish()
        try:
            os.replace(beside, folder)
        except OSError:
            # Another process was first with the same content; its store is as good.
            if not folder.exists():
                raise
    finally:
        for writer in writers.values():
            writer.close()
        shutil.rmtree(beside, ignore_errors=True)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if len(batch) >= _BATCH or size >= _BATCH_SIZE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
