"""A checkpoint's manifest: what its files have to be like, so that a damaged one is known before it is loaded.

It stands beside the checkpoint, ``NAME.json`` for ``NAME.ckpt`` (a file, or the folder of a sharded run), and is
written last: a checkpoint without one was cut off while it was made.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
SUFFIX = ".ckpt"
_BLOCK = 1 << 22


class NewerFormatError(ValueError):
    """A checkpoint of a later version, which this one cannot judge."""


@dataclass(frozen=True)
class Manifest:
    """What is known of a checkpoint without opening it.

    Attributes:
        step: optimizer steps of the run.
        ended: whether the run had no step left.
        files: name inside the checkpoint ("" for a checkpoint of one file) -> (bytes, crc32).
        format: version of the layout.
    """

    step: int
    ended: bool
    files: dict[str, tuple[int, int]]
    format: int = FORMAT


def manifest_path(checkpoint: Path) -> Path:
    """Where the manifest of a checkpoint stands.

    >>> manifest_path(Path("checkpoints/decay.ckpt")).as_posix()
    'checkpoints/decay.json'
    """
    return checkpoint.with_suffix(".json")


def parts(checkpoint: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files of a checkpoint by their names inside it."""
    if checkpoint.is_dir():
        for path in sorted(checkpoint.rglob("*")):
            if path.is_file():
                yield path.relative_to(checkpoint).as_posix(), path
    else:
        yield "", checkpoint


def checksum(path: Path) -> int:
    """Crc32 of a file, as zlib has it."""
    value = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value


def describe(checkpoint: Path, step: int, ended: bool) -> Manifest:
    """Read a checkpoint back from the disk, and note what it is like."""
    files = {name: (path.stat().st_size, checksum(path)) for name, path in parts(checkpoint)}
    return Manifest(step, ended, files)


def write_manifest(manifest: Manifest, checkpoint: Path) -> None:
    """Write a checkpoint's manifest at once or not at all."""
    path = manifest_path(checkpoint)
    beside = path.with_name(f".{path.name}.part")
    with beside.open("w", encoding="utf-8") as file:
        file.write(json.dumps(asdict(manifest)) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def read_manifest(checkpoint: Path) -> Manifest:
    """Read a checkpoint's manifest.

    Raises:
        NewerFormatError: it is of a later version.
        ValueError: there is none, or it is damaged; the message has the reason alone.
    """
    try:
        stored: dict[str, Any] = json.loads(manifest_path(checkpoint).read_text(encoding="utf-8"))
        number = stored["format"]
        if number > FORMAT:
            raise NewerFormatError(f"its format is {number}, and this version reads up to {FORMAT}")
        files = {name: (int(size), int(crc)) for name, (size, crc) in stored["files"].items()}
        return Manifest(int(stored["step"]), bool(stored["ended"]), files, number)
    except FileNotFoundError:
        raise ValueError("it has no manifest: it was cut off while it was written") from None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        raise ValueError("its manifest is damaged") from None


def check(checkpoint: Path, manifest: Manifest) -> None:
    """Compare a checkpoint with its manifest.

    Raises:
        ValueError: a file is missing, cut off or changed; the message has the reason alone.
    """
    found = dict(parts(checkpoint)) if checkpoint.exists() else {}
    for name, (size, crc) in manifest.files.items():
        label = f"its file {name}" if name else "it"
        if name not in found:
            raise ValueError(f"{label} is missing")
        actual = found[name].stat().st_size
        if actual != size:
            raise ValueError(f"{label} has {actual:,} of {size:,} bytes")
        if checksum(found[name]) != crc:
            raise ValueError(f"{label} has other content than was written")
