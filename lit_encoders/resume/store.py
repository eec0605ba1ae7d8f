"""The checkpoints of a run: written beside and renamed, listed newest first, and only sound ones taken."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch import Trainer

from lit_encoders.resume.manifest import (
    SUFFIX,
    Manifest,
    NewerFormatError,
    check,
    describe,
    manifest_path,
    parts,
    read_manifest,
    write_manifest,
)
from lit_encoders.resume.stops import RunStoppedError

PART = ".part"
STEP_PREFIX = "step-"


@dataclass(frozen=True)
class Found:
    """A checkpoint that can be gone on from."""

    path: Path
    manifest: Manifest


def step_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step stands.

    >>> step_path(Path("checkpoints"), 1200).as_posix()
    'checkpoints/step-00001200.ckpt'
    """
    return folder / f"{STEP_PREFIX}{step:08d}{SUFFIX}"


def check_checkpoint(path: Path) -> Manifest | None:
    """Check a checkpoint that a user named; one without a manifest comes from elsewhere, and is taken as it is.

    Raises:
        ValueError: it is damaged; the message has the reason alone.
    """
    if not manifest_path(path).is_file():
        return None
    manifest = read_manifest(path)
    check(path, manifest)
    return manifest


def newest_checkpoint(
    folder: Path, say: Callable[[str], None] = lambda text: None, with_ended: bool = False
) -> Found | None:
    """Find the newest sound checkpoint of a run.

    Args:
        folder: ``checkpoints/`` of the run.
        say: told of each newer one that is not sound, with the reason.
        with_ended: whether one counts that leaves no step to do: with a longer schedule there may be some.

    Raises:
        ValueError: one is of a later version: to go on from an older one would lose work.
    """
    candidates: list[Found] = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        if path.name.startswith("."):
            continue
        try:
            candidates.append(Found(path, read_manifest(path)))
        except NewerFormatError as error:
            raise ValueError(
                f"ckpt_path must be a checkpoint that this version can read, got '{path}': {error}"
            ) from None
        except ValueError as error:
            say(f"checkpoint '{path}' is passed over: {error}")
    # Of two of one step, the one with a phase's name comes first: it stays.
    candidates.sort(key=lambda found: (found.manifest.step, not found.path.name.startswith(STEP_PREFIX)), reverse=True)
    for found in candidates:
        if found.manifest.ended and not with_ended:
            continue
        try:
            check(found.path, found.manifest)
        except (ValueError, OSError) as error:
            say(f"checkpoint '{found.path}' is passed over: {error}")
            continue
        return found
    return None


def save_checkpoint(trainer: Trainer, path: Path, ended: bool) -> None:
    """Write the state of a run: beside first, read back, then renamed; every process has to take part.

    Args:
        trainer: at the end of an accumulation window.
        path: where; a checkpoint that stands there is replaced.
        ended: whether the run has no step left.

    Raises:
        RunStoppedError: it cannot be written, such as on a full disk; what stood there before stays.
    """
    beside = path.with_name(f".{path.name}{PART}")
    try:
        if trainer.is_global_zero:
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove(beside)
        trainer.strategy.barrier()
        trainer.save_checkpoint(beside, weights_only=False)
        if trainer.is_global_zero:
            _publish(beside, path, describe(beside, trainer.global_step, ended))
    except OSError as error:
        _remove(beside)
        raise RunStoppedError(
            f"checkpoint '{path}' cannot be written ({error.strerror or error}); the run stopped after step "
            f"{trainer.global_step}, and its earlier checkpoints are as they were"
        ) from error
    trainer.strategy.barrier()


def _publish(beside: Path, path: Path, manifest: Manifest) -> None:
    for name, file in parts(beside):
        # A crc over what was read back would not notice that too little was written.
        if not name and not zipfile.is_zipfile(file):
            raise OSError(f"{file.name} was not written whole")
        _sync(file)
    # The manifest of what stood here no longer fits, so that between the renames there is no checkpoint of this name.
    manifest_path(path).unlink(missing_ok=True)
    if path.is_dir():
        _remove(path)
    os.replace(beside, path)
    write_manifest(manifest, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk: a power failure must not tear what has its final name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def forget_old(folder: Path, keep: int) -> None:
    """Remove the checkpoints of steps but for the newest ones; those with a phase's name stay.

    Args:
        folder: ``checkpoints/`` of the run.
        keep: how many to leave.
    """
    steps = sorted(folder.glob(f"{STEP_PREFIX}*{SUFFIX}"))
    for path in steps[: max(0, len(steps) - keep)]:
        manifest_path(path).unlink(missing_ok=True)
        _remove(path)


def remove_leftovers(folder: Path) -> None:
    """Remove what a run that was killed had begun to write."""
    for path in folder.glob(f".*{PART}"):
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
