"""The first texts of a source, for measurements that need a fixed number of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import islice

from lit_encoders.data.sources import as_source


def first_texts(
    files: str | Sequence[str], count: int, key: str, text_column: str = "text", *, asked_by: str, fewer: bool = False
) -> list[str]:
    """Read the first texts that are not blank.

    Args:
        files: as data.train takes them.
        count: how many, at least 1.
        key: the setting that names them, for messages.
        text_column: column of the text in anything but plain text.
        asked_by: the setting that says how many, for messages.
        fewer: take what there is where there are fewer, but one at least.

    Raises:
        ValueError: there are fewer, or documents are token ids.
    """
    if count < 1:
        raise ValueError(f"{asked_by} must be at least 1, got {count}")
    texts = []
    for document in islice(as_source(files, text_column, "line", key).documents(), count):
        if not isinstance(document, str):
            raise ValueError(f"{key} must hold text, got token ids")
        texts.append(document)
    if len(texts) < (1 if fewer else count):
        wanted = "one text" if fewer else f"{count} texts ({asked_by})"
        raise ValueError(f"{key} must hold at least {wanted}, got {len(texts)} in {files!r}")
    return texts


def texts_digest(texts: Sequence[str]) -> str:
    """Hash texts and their order, to know the same ones again.

    >>> texts_digest(["a", "bc"]) != texts_digest(["ab", "c"])
    True
    """
    total = hashlib.sha256()
    for text in texts:
        total.update(hashlib.sha256(text.encode()).digest())
    return total.hexdigest()
