"""A study's folder: finished runs are not run again, half-made ones are, and another study is refused."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lit_encoders.studies.results import claim_folder, result_in, run_all, run_once


def test_finished_run_is_not_run_again(tmp_path: Path) -> None:
    calls: list[Path] = []

    def run(folder: Path) -> dict[str, Any]:
        calls.append(folder)
        (folder / "weights").write_text("new")
        return {"loss": 1.5}

    for _ in range(2):
        assert run_once(tmp_path / "a", run) == {"loss": 1.5}
    assert calls == [tmp_path / "a"]


def test_half_made_run_starts_afresh(tmp_path: Path) -> None:
    def fail(folder: Path) -> dict[str, Any]:
        (folder / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_once(tmp_path / "a", fail)
    assert result_in(tmp_path / "a") is None
    assert run_once(tmp_path / "a", lambda folder: {"files": [file.name for file in folder.iterdir()]}) == {"files": []}


def test_folder_is_of_one_study(tmp_path: Path) -> None:
    claim_folder(tmp_path / "new", {"steps": 2, "families": ("a",)})
    claim_folder(tmp_path / "new", {"steps": 2, "families": ("a",)})
    with pytest.raises(ValueError, match=r"^output must be .* of this very study: '.*new' has steps 2, got 3$"):
        claim_folder(tmp_path / "new", {"steps": 3, "families": ("a",)})
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match=r"^output must be a new folder, .*got '.*taken'$"):
        claim_folder(tmp_path / "taken", {})


@pytest.mark.parametrize("jobs", [1, 2])
def test_runs_go_one_by_one_or_side_by_side(tmp_path: Path, jobs: int) -> None:
    # Tests are no package: other processes only find functions of installed modules.
    run: Any = os.fspath
    folders = [tmp_path / name for name in ("a", "b", "c")]
    run_once(folders[1], lambda folder: {"loss": 1.5})
    said: list[str] = []
    results = run_all(dict.fromkeys(folders, run), jobs, said.append)
    assert results == {folders[0]: str(folders[0]), folders[1]: {"loss": 1.5}, folders[2]: str(folders[2])}
    assert sorted(line.rpartition("/")[2] for line in said) == ["a", "c"]
    assert [line.partition(":")[0] for line in said] == ["2 of 3", "3 of 3"]


@pytest.mark.parametrize("jobs", [1, 2])
def test_failed_run_stops_the_study_and_leaves_no_result(tmp_path: Path, jobs: int) -> None:
    run: Any = os.readlink
    folders = [tmp_path / name for name in ("a", "b")]
    with pytest.raises(OSError, match="Invalid argument"):
        run_all(dict.fromkeys(folders, run), jobs, print)
    assert result_in(folders[0]) is result_in(folders[1]) is None


def test_workers_end_with_their_study(tmp_path: Path) -> None:
    """Killed, not asked: workers that went on would write into a folder that another study has taken over."""
    code = (
        "import time\n"
        "from functools import partial\n"
        "from pathlib import Path\n"
        "from lit_encoders.studies.results import run_all\n"
        "if __name__ == '__main__':\n"
        f"    root = Path({str(tmp_path)!r})\n"
        "    print('begun', flush=True)\n"
        "    run_all({root / name: partial(_sleep, 600) for name in 'ab'}, 2, print)\n"
    )
    script = tmp_path / "study.py"
    script.write_text("def _sleep(seconds, folder):\n    (folder / 'begun').touch()\n    time.sleep(seconds)\n" + code)
    study = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        until(lambda: all((tmp_path / name / "begun").exists() for name in "ab"))
        workers = children(study.pid)
        assert len(workers) >= 2
        study.kill()
        study.wait()
        until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))
    finally:
        study.kill()


def until(true: Callable[[], bool], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


def children(parent: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True, check=True)
    return [int(line) for line in listed.stdout.split()]
