"""A run's folder: one process at a time, and one configuration."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lit_encoders.resume.run_folder import RunLock, differences, what_decides

HOLD = """
import sys, time
from pathlib import Path
from lit_encoders.resume.run_folder import RunLock
try:
    lock = RunLock(Path(sys.argv[1]))
except ValueError as error:
    print(error, flush=True)
else:
    print("held", flush=True)
    sys.stdin.readline()
"""


def hold(folder: Path) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], **pipes)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_two_processes_cannot_hold_one_folder(tmp_path: Path) -> None:
    first = hold(tmp_path)
    assert said(first) == "held"
    second = hold(tmp_path)
    assert said(second) == (
        f"trainer.default_root_dir must be a folder that no other process trains in, got '{tmp_path}'"
    )
    first.kill()  # However it ends, the folder is free.
    first.wait()
    third = hold(tmp_path)
    assert said(third) == "held"
    third.communicate("\n")
    second.wait()


def test_processes_that_outlive_a_run_do_not_hold_its_folder(tmp_path: Path) -> None:
    """As workers that read data do for a while after their trainer was killed."""
    lock = RunLock(tmp_path)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reader, 1)
        os._exit(0)
    lock._file.close()  # type: ignore[union-attr]
    process = hold(tmp_path)
    assert said(process) == "held"
    process.communicate("\n")
    os.write(writer, b"x")
    os.waitpid(child, 0)


def test_release_leaves_nothing(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    assert list(tmp_path.iterdir())
    lock.release()
    lock.release()
    assert not list(tmp_path.iterdir())


SETTINGS: dict[str, Any] = {
    "seed_everything": 0,
    "ckpt_path": "auto",
    "model": {"class_path": "lit_encoders.LitMLM", "init_args": {"backbone": {"hidden_size": 8}, "compile": False}},
    "data": {"train": ["a.txt"], "num_workers": 0},
    "schedule": {"init_args": {"steps": 5}},
    "trainer": {
        "devices": 1,
        "precision": "32-true",
        "callbacks": [
            {"class_path": "lit_encoders.callbacks.L2SP", "init_args": {"strength": 0.1}},
            {"class_path": "lit_encoders.callbacks.L2SP", "init_args": {"strength": 0.2}},
            {"class_path": "lit_encoders.callbacks.ExactResume", "init_args": {"every_n_steps": 5}},
        ],
    },
}


def changed(key: str, value: Any) -> dict[str, Any]:
    """The settings with another value at a dotted key; a number is a place in a list."""
    import copy

    settings = copy.deepcopy(SETTINGS)
    place: Any = settings
    *path, last = key.split(".")
    for name in path:
        place = place[int(name) if name.isdigit() else name]
    place[last] = value
    return settings


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("seed_everything", 1, "seed_everything 0, got 1"),
        ("model.class_path", "X", "model.class_path 'lit_encoders.LitMLM', got 'X'"),
        ("model.init_args.backbone.hidden_size", 16, "model.init_args.backbone.hidden_size 8, got 16"),
        ("model.init_args.more", 1, "model.init_args.more None, got 1"),
        ("data.train", ["b.txt"], "data.train ['a.txt'], got ['b.txt']"),
        ("trainer.precision", "bf16-mixed", "trainer.precision '32-true', got 'bf16-mixed'"),
        ("trainer.callbacks.1.init_args", {}, "trainer.callbacks.L2SP-2 {'strength': 0.2}, got {}"),
        ("trainer.callbacks.0.class_path", "my.Own", "trainer.callbacks.Own None, got {'strength': 0.1}"),
    ],
)
def test_what_decides_is_compared(key: str, value: Any, line: str) -> None:
    assert line in differences(SETTINGS, changed(key, value))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ckpt_path", None),
        ("model.init_args.compile", True),
        ("data.num_workers", 4),
        ("schedule.init_args.steps", 9),  # Compared phase by phase, where it is resolved.
        ("trainer.devices", 2),
        ("trainer.callbacks.2.init_args", {}),
    ],
)
def test_what_does_not_decide_is_free(key: str, value: Any) -> None:
    assert differences(SETTINGS, changed(key, value)) == []
    assert key not in what_decides(SETTINGS)
