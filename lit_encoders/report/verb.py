"""The command line's ``report``: one page of HTML about runs."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from lit_encoders.report.page import GENERATOR, render
from lit_encoders.report.run_record import read_run, run_names

DEFAULT = "report.html"
# The mark of a page stands within its first bytes.
_HEAD = 1000


def check_output(path: Path) -> None:
    """Refuse a place that no page can be written to, or where another file would be lost.

    Raises:
        ValueError: it is a folder, a file that is no page of this verb's, or in a folder that cannot be written.
    """
    if path.is_dir():
        raise ValueError(f"output must be a file, got the folder '{path}'")
    try:
        if path.exists() and GENERATOR.encode() not in _head(path):
            raise ValueError(f"output must be a new file, or a page of an earlier report, got '{path}'")
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"output must be a file that can be written, got '{path}' ({error.strerror})") from error
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"output must be a file that can be written, got '{path}' (its folder cannot)")


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_HEAD)


def write_page(path: Path, text: str) -> None:
    """Write a page at once or not at all.

    Raises:
        ValueError: see `check_output`.
    """
    check_output(path)
    beside = path.with_name(f".{path.name}.part")
    try:
        # Names of folders may hold bytes that are no text.
        beside.write_bytes(text.encode("utf-8", "replace"))
        beside.replace(path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise ValueError(f"output must be a file that can be written, got '{path}' ({error.strerror})") from error


def report_verb(runs: list[str], output: Path | None = None) -> str:
    """Write one page of HTML about runs, with nothing in it that is fetched from elsewhere.

    Args:
        runs: run folders, finished or not; several are compared, a column and a colour for each.
        output: the page; report.html in the first run's folder without it. Only an earlier page is written over.

    Raises:
        ValueError: no run is given, a folder is none, or the page cannot be written there.
    """
    names = run_names(runs)
    records = [read_run(folder, name) for folder, name in zip(runs, names, strict=True)]
    path = Path(runs[0]) / DEFAULT if output is None else output
    write_page(path, render(records))
    states = [f"{record.name}: {record.state}, {record.steps:,} steps" for record in records]
    return "\n".join([*states, str(path)])
