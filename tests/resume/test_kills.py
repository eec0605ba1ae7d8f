"""A run that is killed at random moments and started again gives the bytes of the run that was left alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("kills.py")


def kill(folder: Path, kills: int, seed: int, number: str, data: str) -> None:
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(folder), str(kills), str(seed), number, data]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    runs = json.loads(done.stdout.splitlines()[-1])
    print(runs)  # Where it was killed, for whoever asks with -s.
    assert sum(len(run["steps"]) for run in runs) == kills
    for run in runs:
        assert run["equal"], run
        assert run["same_table"], run
        assert run["leftovers"] == [], run


@pytest.mark.parametrize(
    ("number", "data", "kills"),
    [
        ("SIGKILL", "map-0", 3),
        ("SIGKILL", "map-2", 3),
        ("SIGKILL", "mixed-0", 3),
        ("SIGKILL", "stream-2", 3),
        ("SIGTERM", "map-0", 3),
    ],
)
def test_killed_runs_end_as_if_left_alone(tmp_path: Path, number: str, data: str, kills: int) -> None:
    kill(tmp_path / "runs", kills, 0, number, data)


# 210 kills of each signal.
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("data", ["map-0", "map-2", "mixed-0", "stream-0", "stream-2"])
@pytest.mark.parametrize("number", ["SIGTERM", "SIGKILL"])
def test_killed_many_times(tmp_path: Path, seed: int, number: str, data: str) -> None:
    kill(tmp_path / "runs", 7, seed, number, data)
