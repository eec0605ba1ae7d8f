"""A run that is killed at random moments and started again gives the bytes of the run that was left alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("kills.py")


def kill(folder: Path, kills: int, seed: int, number: str, data: str) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(folder), str(kills), str(seed), number, data]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("number", "data", "kills"),
    [("SIGKILL", "map-0", 4), ("SIGKILL", "map-2", 3), ("SIGKILL", "mixed-0", 3), ("SIGTERM", "map-0", 3)],
)
def test_killed_runs_end_as_if_left_alone(tmp_path: Path, number: str, data: str, kills: int) -> None:
    found = kill(tmp_path / "runs", kills, 0, number, data)
    assert found["equal"], found
    assert found["same_table"], found
    assert found["leftovers"] == []
    assert found["kills"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("number", "data"),
    [("SIGKILL", "map-0"), ("SIGKILL", "map-2"), ("SIGKILL", "mixed-0"), ("SIGKILL", "stream-0"), ("SIGTERM", "map-2")],
)
def test_killed_many_times(tmp_path: Path, seed: int, number: str, data: str) -> None:
    found = kill(tmp_path / "runs", 7, seed, number, data)
    assert found["equal"], found
    assert found["same_table"], found
