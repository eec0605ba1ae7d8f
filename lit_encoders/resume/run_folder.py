"""A run's folder: held by one process at a time, and gone on with by the same configuration only."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any

LOCK = ".lock"

# What a run's weights do not depend on, or what is checked where it can be understood: the schedule by its phases,
# ranks and accumulation by their product.
FREE_MODEL = ("compile", "attention", "activation_checkpointing")
FREE_DATA = ("num_workers", "cache_dir")
COMPARED_TRAINER = ("precision", "gradient_clip_val", "gradient_clip_algorithm")
FREE_CALLBACKS = (
    "ExactResume",
    "GradientProbe",
    "HFExport",
    "NumericsGuard",
    "RunSummary",
    "Throughput",
    "TrainingProgress",
    "WeightDrift",
)


class RunLock:
    """Holds a folder for as long as this process lives, or until it is released.

    Args:
        folder: of a run, or of a study.
        key: the setting that names it, for messages.

    Raises:
        ValueError: another process holds it.
    """

    def __init__(self, folder: Path, key: str = "trainer.default_root_dir") -> None:
        self.path = folder / LOCK
        self._file: TextIOWrapper | None = self.path.open("a", encoding="utf-8")
        try:
            # Dropped with the process, however that ends. Not flock, which workers that outlive it would inherit.
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            self._file = None
            raise ValueError(f"{key} must be a folder that no other process trains in, got '{folder}'") from None

    def release(self) -> None:
        """Let others have the folder."""
        if self._file is not None:
            self.path.unlink(missing_ok=True)
            self._file.close()
            self._file = None


def flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested settings by their dotted keys.

    >>> dict(flat({"a": {"b": 1}, "c": [2, 3]}))
    {'a.b': 1, 'c': [2, 3]}
    """
    if isinstance(value, Mapping) and value:
        for name, below in value.items():
            yield from flat(below, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def what_decides(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a fit that its weights depend on, by their dotted keys.

    Args:
        settings: in plain types, as a saved configuration has them.
    """
    trainer = settings.get("trainer") or {}
    found: dict[str, Any] = {"seed_everything": settings.get("seed_everything")}
    for key, free in (("model", FREE_MODEL), ("data", FREE_DATA)):
        found |= {name: leaf for name, leaf in flat(settings.get(key), key) if name.rpartition(".")[2] not in free}
    found |= {f"trainer.{name}": trainer.get(name) for name in COMPARED_TRAINER}
    for callback in _callbacks(trainer.get("callbacks")):
        name = str(callback.get("class_path", "")).rpartition(".")[2]
        if name not in FREE_CALLBACKS:
            key, number = f"trainer.callbacks.{name}", 1
            while key in found:
                number += 1
                key = f"trainer.callbacks.{name}-{number}"
            found[key] = callback.get("init_args") or {}
    return found


def _callbacks(value: Any) -> Sequence[Mapping[str, Any]]:
    every = value if isinstance(value, list) else [value]
    return [callback for callback in every if isinstance(callback, Mapping)]


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What two configurations decide differently: one text for each key, with the old value and the new one.

    >>> differences({"seed_everything": 0, "model": {"eps": 1}}, {"seed_everything": 0, "model": {"eps": 2}})
    ['model.eps 1, got 2']
    """
    old, new = what_decides(before), what_decides(now)
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return [f"{key} {old.get(key)!r}, got {new.get(key)!r}" for key in keys]
