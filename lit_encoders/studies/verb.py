"""``lit-encoders study NAME``."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from lit_encoders.resume.run_folder import RunLock

# What a study's function takes: its folder, and the options below.
Study = Callable[[Path, bool, int, bool, str], str]


def _alignment(output: Path, fast: bool, jobs: int, keep_models: bool, command: str) -> str:
    from lit_encoders.studies.alignment import AlignmentSettings, run_alignment, shortened

    settings = shortened(AlignmentSettings()) if fast else AlignmentSettings()
    return run_alignment(output, settings, jobs=jobs, keep_models=keep_models, command=command, say=_say)


def _mask_ratio(output: Path, fast: bool, jobs: int, keep_models: bool, command: str) -> str:
    from lit_encoders.studies.mask_ratio import MaskRatioSettings, run_mask_ratio, shortened

    _need_scikit_learn("mask-ratio")
    settings = shortened(MaskRatioSettings()) if fast else MaskRatioSettings()
    return run_mask_ratio(output, settings, jobs=jobs, keep_models=keep_models, command=command, say=_say)


def _detour(output: Path, fast: bool, jobs: int, keep_models: bool, command: str) -> str:
    from lit_encoders.studies.detour import DetourSettings, run_detour, shortened

    _need_scikit_learn("detour")
    settings = shortened(DetourSettings()) if fast else DetourSettings()
    return run_detour(output, settings, jobs=jobs, keep_models=keep_models, command=command, say=_say)


def _need_scikit_learn(name: str) -> None:
    if find_spec("sklearn") is None:
        raise ValueError(f"study {name} needs scikit-learn: pip install -c constraints.txt -e '.[eval]'")


STUDIES: dict[str, Study] = {"alignment": _alignment, "detour": _detour, "mask-ratio": _mask_ratio}


def study_verb(
    name: str,
    output: Path | None = None,
    fast: bool | None = False,
    jobs: int | None = None,
    keep_models: bool | None = False,
) -> str:
    """Run several runs and make one table of them; called again, go on with what is left.

    Args:
        name: of the study, alignment, detour or mask-ratio.
        output: folder, new or of the same study; runs/study-NAME if not given.
        fast: a few steps of everything in a minute, to see that it runs; its numbers mean nothing.
        jobs: runs at once, each on one processor and in up to 3 GB of memory; as many as there are processors, at most
            8, if not given.
        keep_models: keep the weights of all runs, 70 to 270 MB each.

    Raises:
        ValueError: no such study, or what it raises.
    """
    if name not in STUDIES:
        near = get_close_matches(name, STUDIES, n=1)
        hint = f"; {near[0]}?" if near else ""
        raise ValueError(f"study must be one of {', '.join(STUDIES)}, got {name!r}{hint}")
    folder = output or Path("runs") / (f"study-{name}-fast" if fast else f"study-{name}")
    options = ["--fast"] if fast else []
    command = f"lit-encoders study {name} {' '.join([f'--output={shlex.quote(str(folder))}', *options])}"
    # Starting processes takes longer than a few steps.
    processors = 1 if fast else min(os.cpu_count() or 1, 8)
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    lock = RunLock(folder, "output")
    try:
        return STUDIES[name](folder, bool(fast), processors if jobs is None else jobs, bool(keep_models), command)
    finally:
        lock.release()
        if new and not any(folder.iterdir()):
            folder.rmdir()


def _say(text: str) -> None:
    """Tell what goes on, beside what is printed at the end."""
    print(text, file=sys.stderr, flush=True)
