"""Tables of the `datasets` library: folders that it saved, and names on its hub."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_encoders.data.formats import ROWS, Placed, Reading, hash_files, one_line, placed

if TYPE_CHECKING:
    from datasets import Dataset

HUB = "hub:"
_HUB_NAME = re.compile(r"hub:(?P<name>[^:#]+)(?::(?P<config>[^:#]+))?(?:#(?P<split>[^#]+))?")


@dataclass(frozen=True)
class SavedDataset:
    """A folder written by ``save_to_disk``.

    Args:
        path: the folder, of one dataset or of several splits.
        split: which of several; None takes "train".
    """

    path: Path
    split: str | None = None

    def is_known(self) -> bool:
        """Whether the folder says that it is one."""
        return any((self.path / name).is_file() for name in ("dataset_dict.json", "dataset_info.json"))

    def values(self, reading: Reading) -> Iterator[Placed]:
        return _column(self._load(reading), f"'{self.path}'", reading)

    def digest(self, reading: Reading) -> str:
        files = [Path(file["filename"]) for file in self._load(reading).cache_files]
        return hash_files(files, "saved dataset", reading.key)

    def _load(self, reading: Reading) -> Dataset:
        from datasets import load_from_disk

        folder, rule = self.path, "name a folder that `save_to_disk` wrote"
        with _named(reading.key, rule, str(folder)):
            index = folder / "dataset_dict.json"
            splits = list(json.loads(index.read_text(encoding="utf-8"))["splits"]) if index.is_file() else []
        if splits:
            folder = self.path / self._known_split(splits, reading.key)
        elif self.split is not None:
            raise ValueError(f"{reading.key}: '{self.path}' must have splits, got one dataset and '#{self.split}'")
        if not any(folder.glob("*.arrow")):
            # The library saves a table without rows, but cannot load it.
            raise ValueError(f"{reading.key} must hold at least one document that is not blank, got none in '{folder}'")
        with _named(reading.key, rule, str(folder)):
            # In memory it would have no files to hash.
            return load_from_disk(folder, keep_in_memory=False)

    def _known_split(self, splits: list[str], key: str) -> str:
        split = self.split or "train"
        if split not in splits:
            near = get_close_matches(split, splits, n=1)
            raise ValueError(
                f"{key}: the split of '{self.path}' ('FOLDER#SPLIT') must be one of {', '.join(splits)}, got {split!r}"
                + (f"; {near[0]}?" if near else "")
            )
        return split


@dataclass(frozen=True)
class HubDataset:
    """A dataset of the hub: ``hub:OWNER/NAME``, ``hub:OWNER/NAME:CONFIG#SPLIT``; the split is "train" if not given.

    It is downloaded once, into the cache of `datasets`, and read from there.
    """

    name: str

    @property
    def path(self) -> None:
        return None

    def values(self, reading: Reading) -> Iterator[Placed]:
        return _column(self._load(reading), repr(self.name), reading)

    def digest(self, reading: Reading) -> str:
        # Made of name, config, revision and split.
        fingerprint = self._load(reading)._fingerprint
        return hashlib.sha256(f"{self.name}\n{fingerprint}".encode()).hexdigest()

    def _load(self, reading: Reading) -> Dataset:
        parts = hub_name(self.name, reading.key)
        with _named(reading.key, "name a dataset of the hub that can be loaded", self.name):
            return _from_hub(*parts)


def hub_name(name: str, key: str) -> tuple[str, str | None, str]:
    """Dataset, configuration and split of a name on the hub.

    Args:
        name: ``hub:OWNER/NAME``, ``hub:OWNER/NAME:CONFIG#SPLIT``.
        key: the setting, for messages.

    Raises:
        ValueError: it is no such name.

    >>> hub_name("hub:me/text:small#test", "data.train")
    ('me/text', 'small', 'test')
    """
    parts = _HUB_NAME.fullmatch(name)
    if parts is None:
        raise ValueError(f"{key} must be hub:OWNER/NAME or hub:OWNER/NAME:CONFIG#SPLIT, got {name!r}")
    return parts["name"], parts["config"], parts["split"] or "train"


@cache
def _from_hub(name: str, config: str | None, split: str) -> Dataset:
    # Kept, so that a run asks the hub once and stays with the revision that it found.
    from datasets import load_dataset

    return load_dataset(name, config, split=split)


def _column(dataset: Dataset, name: str, reading: Reading) -> Iterator[Placed]:
    reading.check_columns(dataset.column_names, name)
    with _named(reading.key, "be readable to its end", name.strip("'")):
        tables: Iterator[Any] = dataset.select_columns([reading.text_column]).with_format("arrow").iter(ROWS)
        yield from placed((table.column(0) for table in tables), name)


@contextmanager
def _named(key: str, rule: str, name: str) -> Iterator[None]:
    """Say what the library could not do with a name; its errors are of many kinds, some of packages below it."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{key} must {rule}, got {name!r} ({one_line(error)})") from error
