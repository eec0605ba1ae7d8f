"""A study's folder: one result for each run, written when the run is over, so that no finished run is run again.

Runs that do not need each other go side by side, each in a process with one thread: small models use processors better
that way than by threads (a step of 512 tokens takes 0.5 processor seconds either way, but threads wait for each other).
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from threading import Thread
from typing import Any

from lit_encoders.resume.run_folder import LOCK

RESULT = "result.json"
STUDY = "study.json"
# What a run does in its folder; what it gives is its result, in plain types.
Run = Callable[[Path], dict[str, Any]]


def versions() -> dict[str, str]:
    """Versions of what decides on a run's numbers."""
    return {name: version(name) for name in ("lit_encoders", "torch", "transformers", "lightning")}


def claim_folder(output: Path, facts: Mapping[str, Any]) -> None:
    """Make a study's folder, or go on in the one of the very same study.

    Args:
        output: the folder.
        facts: what its results depend on, plain types.

    Raises:
        ValueError: the folder holds something else, or the study that began there was another one.
    """
    known = output / STUDY
    # As it comes back from the file: tuples are lists there.
    plain = json.loads(json.dumps(facts))
    if known.is_file():
        before = json.loads(known.read_text(encoding="utf-8"))
        changed = [key for key in {**before, **plain} if before.get(key) != plain.get(key)]
        if changed:
            was, now = before.get(changed[0]), plain.get(changed[0])
            raise ValueError(
                f"output must be a new folder, or one of this very study: '{output}' has {changed[0]} {was!r}, "
                f"got {now!r}"
            )
        return
    if output.exists() and (not output.is_dir() or any(path.name != LOCK for path in output.iterdir())):
        raise ValueError(f"output must be a new folder, or one of an unfinished study, got '{output}'")
    output.mkdir(parents=True, exist_ok=True)
    write_json(known, plain)


def run_once(folder: Path, run: Run) -> dict[str, Any]:
    """The result of a run: the one in its folder, else that of running it now, in an empty folder.

    Args:
        folder: of the run; what an interrupted run left there is removed.
        run: gets the folder, gives its result in plain types.
    """
    if (found := result_in(folder)) is not None:
        return found
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    result = run(folder)
    write_json(folder / RESULT, result)
    return result


def run_all(runs: Mapping[Path, Run], jobs: int, say: Callable[[str], None]) -> dict[Path, dict[str, Any]]:
    """The results of runs that do not need each other, by folder; see `run_once`.

    Args:
        runs: what to do in each folder; it has to survive a trip to another process.
        jobs: runs at once, each in a process with one thread; 1 runs them here, with as many threads as there are, and
            so is a run that stands alone.
        say: told of each run that ends.
    """
    results = {folder: found for folder in runs if (found := result_in(folder)) is not None}
    missing = [folder for folder in runs if folder not in results]

    def take(folder: Path, result: dict[str, Any]) -> None:
        results[folder] = result
        say(f"{len(results)} of {len(runs)}: {folder}")

    # By all runs, not by those that are left: one thread rounds otherwise than several, and what is interrupted has to
    # come out as it would have.
    if jobs == 1 or len(runs) < 2 or not missing:
        for folder in missing:
            take(folder, run_once(folder, runs[folder]))
        return results
    # Spawned, not forked: threads of this process would leave their locks behind.
    count, context = min(jobs, len(missing)), get_context("spawn")
    pool = ProcessPoolExecutor(count, context, initializer=_begin_worker, initargs=(os.getpid(),))
    try:
        futures = {pool.submit(run_once, folder, runs[folder]): folder for folder in missing}
        for future in as_completed(futures):
            take(futures[future], future.result())
    finally:
        pool.shutdown(cancel_futures=True)
    return results


def _begin_worker(parent: int) -> None:
    import torch

    torch.set_num_threads(1)
    Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """End this process when the study's is gone: it would go on writing into a folder that another one has taken."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def result_in(folder: Path) -> dict[str, Any] | None:
    """The result of a finished run; None where there is none."""
    file = folder / RESULT
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def write_json(path: Path, value: Any) -> None:
    """Write a file at once or not at all."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file at once or not at all."""
    beside = path.with_name(f".{path.name}")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)
