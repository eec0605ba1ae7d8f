"""The store of checkpoints: the newest sound one is found, damage is named, and a failed write costs nothing."""

from __future__ import annotations

import errno
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer

from lit_encoders.resume.manifest import describe, manifest_path, write_manifest
from lit_encoders.resume.stops import RunStoppedError
from lit_encoders.resume.store import (
    check_checkpoint,
    forget_old,
    newest_checkpoint,
    remove_leftovers,
    save_checkpoint,
    step_path,
)


def put(folder: Path, name: str, step: int, ended: bool = False) -> Path:
    """A checkpoint with its manifest."""
    path = folder / name
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("data", f"{step} " * 100)
    write_manifest(describe(path, step, ended), path)
    return path


def test_the_newest_is_found_and_a_phase_s_name_wins(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "none") is None
    put(tmp_path, "step-00000009.ckpt", 9)
    put(tmp_path, "step-00000010.ckpt", 10)
    detour = put(tmp_path, "detour.ckpt", 10)
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert (found.path, found.manifest.step) == (detour, 10)


def test_the_end_of_a_run_counts_where_there_may_be_more(tmp_path: Path) -> None:
    before, end = put(tmp_path, "step-00000009.ckpt", 9), put(tmp_path, "decay.ckpt", 10, ended=True)
    assert [newest_checkpoint(tmp_path, with_ended=more).path for more in (False, True)] == [before, end]  # type: ignore[union-attr]


def damage_cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def damage_flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def damage_manifest(path: Path) -> None:
    manifest_path(path).write_text("{")


def damage_half(path: Path) -> None:
    manifest_path(path).unlink()


@pytest.mark.parametrize("damage", [damage_cut, damage_flip, damage_manifest, damage_half])
def test_a_damaged_one_is_named_and_the_one_before_taken(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    sound, newest = put(tmp_path, "step-00000009.ckpt", 9), put(tmp_path, "step-00000010.ckpt", 10)
    damage(newest)
    said: list[str] = []
    found = newest_checkpoint(tmp_path, said.append)
    assert found is not None
    assert found.path == sound
    (line,) = said
    assert line.startswith(f"checkpoint '{newest}' is passed over: it")


def test_a_later_version_s_checkpoint_is_not_passed_over(tmp_path: Path) -> None:
    put(tmp_path, "step-00000009.ckpt", 9)
    newest = put(tmp_path, "step-00000010.ckpt", 10)
    manifest_path(newest).write_text(manifest_path(newest).read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(ValueError, match=r"ckpt_path must be a checkpoint that this version can read, got .*99"):
        newest_checkpoint(tmp_path)


def test_a_named_checkpoint_without_a_manifest_is_taken(tmp_path: Path) -> None:
    path = put(tmp_path, "mine.ckpt", 3)
    assert check_checkpoint(path) is not None
    manifest_path(path).unlink()
    assert check_checkpoint(path) is None


def test_old_steps_are_forgotten_and_phases_stay(tmp_path: Path) -> None:
    for step in range(5):
        put(tmp_path, step_path(tmp_path, step).name, step)
    put(tmp_path, "detour.ckpt", 1)
    forget_old(tmp_path, keep=2)
    names = {"step-00000003", "step-00000004", "detour"}
    assert {path.name for path in tmp_path.iterdir()} == {f"{n}.{end}" for n in names for end in ("ckpt", "json")}


def test_leftovers_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".step-1.ckpt.part").mkdir()
    (tmp_path / ".decay.json.part").write_text("{")
    kept = put(tmp_path, "decay.ckpt", 1)
    remove_leftovers(tmp_path)
    assert set(tmp_path.iterdir()) == {kept, manifest_path(kept)}


@pytest.mark.parametrize("moment", ["write", "short", "rename"])
def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_trainer: Any, moment: str
) -> None:
    trainer: Trainer = make_trainer()
    path = put(tmp_path, "step-00000009.ckpt", 9)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    full = OSError(errno.ENOSPC, "No space left on device")

    def write(beside: Path, **_: Any) -> None:
        Path(beside).write_bytes(b"half of it")
        if moment == "write":
            raise full

    def sync(_: Path) -> None:
        raise full

    monkeypatch.setattr(trainer, "save_checkpoint", write)
    if moment == "rename":
        monkeypatch.setattr("zipfile.is_zipfile", lambda _: True)
        monkeypatch.setattr("lit_encoders.resume.store._sync", sync)
    reason = "was not written whole" if moment == "short" else "No space left on device"
    with pytest.raises(
        RunStoppedError, match=rf"step-00000009.ckpt' cannot be written \(.*{reason}\); the run stopped"
    ):
        save_checkpoint(trainer, path, ended=False)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
