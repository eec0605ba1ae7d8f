"""Tables of a page: what runs are, their phases, their newest values, and whatever else their summaries record."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from lit_encoders.report.run_record import RunRecord

# Keys of a summary that other tables show.
SHOWN_ELSEWHERE = ("phases", "steps", "tokens", "epochs", "precision", "export")
# Clocks and switches, whose last value says nothing.
NO_METRICS = ("hp_metric", "epoch", "step", "train/objective", "train/tokens", "train/seconds")
MISSING = "–"


@dataclass(frozen=True)
class Table:
    """A table of texts.

    Attributes:
        title: above it; may be empty.
        heads: of the columns.
        rows: as wide as ``heads``.
        num_texts: columns from the left that are text; the others are numbers, and stand at the right.
    """

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_texts: int = 1


def show(value: Any) -> str:
    """A value as people read it.

    >>> [show(value) for value in (None, True, 12345, 9.05689, 0.0002, 30944.4, float("nan"), "x")]
    ['–', 'true', '12,345', '9.057', '0.0002', '30,944', 'nan', 'x']
    """
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        if abs(value) >= 1000 or value.is_integer():
            return f"{value:,.0f}"
        return f"{value:.3f}" if abs(value) >= 1 else f"{value:.3g}"
    return str(value)


def overview(runs: Sequence[RunRecord]) -> Table:
    """What each run is, a column for each."""

    def facts(run: RunRecord) -> dict[str, str]:
        epochs = run.summary.get("epochs")
        every = epochs.items() if isinstance(epochs, Mapping) else []
        tokens = run.summary.get("tokens") or (run.clock.marks[-1][1] if run.clock.marks else None)
        last = None if run.last_time is None else datetime.fromtimestamp(run.last_time).strftime("%Y-%m-%d %H:%M")
        seconds = run.curves.get("train/seconds")
        return {
            "state": run.state,
            "folder": run.folder,
            "steps": show(run.steps),
            "tokens": MISSING if tokens is None else f"{tokens:,.0f}",
            "epochs": ", ".join(f"{name} {show(number)}" for name, number in every) or show(epochs),
            "time in training steps": str(timedelta(seconds=round(seconds[-1].value))) if seconds else MISSING,
            "precision": show(run.summary.get("precision")),
            "export": show(run.summary.get("export")),
            "settings from": run.config_file or MISSING,
            "last logged": show(last),
        }

    columns = [facts(run) for run in runs]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    kept = [row for row in rows if any(cell != MISSING for cell in row[1:])]
    return Table("", ["", *(run.name for run in runs)], kept, num_texts=1 + len(runs))


def phase_table(runs: Sequence[RunRecord]) -> Table:
    """Phases of all runs, with held-out losses at their two ends."""
    losses = list(dict.fromkeys(name for run in runs for phase in run.phases for name in phase.losses))
    rows = [
        [
            run.name,
            phase.name if phase.ended else f"{phase.name} (goes on)",
            phase.objective,
            f"{phase.start:,}–{phase.stop:,}",
            MISSING if phase.tokens is None else f"{phase.tokens:,.0f}",
            MISSING if phase.tokens_per_second is None else f"{phase.tokens_per_second:,.0f}",
            *(" → ".join(map(show, phase.losses[name])) if name in phase.losses else MISSING for name in losses),
        ]
        for run in runs
        for phase in run.phases
    ]
    heads = ["run", "phase", "objective", "steps", "tokens", "tokens/s", *(title_of(name) for name in losses)]
    # The only run needs no column.
    first = 0 if len(runs) > 1 else 1
    return Table("", heads[first:], [row[first:] for row in rows], num_texts=3 - first)


def title_of(tag: str) -> str:
    """How a scalar is called in words.

    >>> title_of("val/mlm_loss"), title_of("val/general/clm_loss"), title_of("train/learning_rate")
    ('held-out MLM loss', 'held-out general CLM loss', 'learning rate')
    """
    first, slash, rest = tag.partition("/")
    where = {"val": "held-out ", "train": ""}.get(first, f"{first} ") if slash else first
    words = [word.upper() if word in ("mlm", "clm", "kd") else word for word in rest.replace("_", "/").split("/")]
    return f"{where}{' '.join(words)}"


def newest_table(runs: Sequence[RunRecord]) -> Table:
    """The newest value of each scalar, held-out ones first."""
    tags = sorted(
        {tag for run in runs for tag in run.curves if tag not in NO_METRICS},
        key=lambda tag: (not tag.startswith("val/"), not tag.endswith("loss"), tag),
    )

    def cell(run: RunRecord, tag: str) -> str:
        points = run.curves.get(tag)
        return f"{show(points[-1].value)} (step {points[-1].step:,})" if points else MISSING

    return Table("", ["", *(run.name for run in runs)], [[tag, *(cell(run, tag) for run in runs)] for tag in tags])


def record_tables(run: RunRecord) -> list[Table]:
    """Whatever else the summary of a run records: its sources, its streams, layers that were set back."""
    rest = {key: value for key, value in run.summary.items() if key not in SHOWN_ELSEWHERE and value is not None}
    return tables_of(rest, f"{run.name}: records")


def evaluation_tables(run: RunRecord) -> list[Table]:
    """Results of evaluations, as ``evaluation.json`` has them: any nesting of names and numbers."""
    return [] if run.evaluation is None else tables_of(run.evaluation, run.name)


def tables_of(value: Any, title: str) -> list[Table]:
    """Show nested names and values: a mapping of mappings of values as one table, what is deeper as further ones.

    >>> [table.rows for table in tables_of({"low": {"share": 0.8}, "high": {"share": 0.2}}, "streams")]
    [[['low', '0.8'], ['high', '0.2']]]
    """
    if isinstance(value, list):
        value = dict(enumerate(value, 1))
    elif not isinstance(value, Mapping):
        value = {"": value}
    # A list of mappings is a mapping by number.
    value = {key: dict(enumerate(v, 1)) if _holds_mappings(v) else v for key, v in value.items()}
    plain = {key: inner for key, inner in value.items() if not isinstance(inner, Mapping)}
    nested = {key: inner for key, inner in value.items() if isinstance(inner, Mapping)}
    tables = []
    if plain:
        rows = [[str(key), ", ".join(map(show, v)) if isinstance(v, list) else show(v)] for key, v in plain.items()]
        tables.append(Table(title, ["", "value"], rows))
    flat = {key: inner for key, inner in nested.items() if not any(isinstance(v, Mapping) for v in inner.values())}
    columns = list(dict.fromkeys(column for inner in flat.values() for column in inner))
    alike = len(flat) > 1 and len(flat) == len(nested) and all(set(inner) & set(columns[:1]) for inner in flat.values())
    if alike:
        rows = [[str(key), *(show(inner.get(column)) for column in columns)] for key, inner in flat.items()]
        return [*tables, Table(title, ["", *map(str, columns)], rows)]
    for key, inner in nested.items():
        tables += tables_of(inner, f"{title}, {key}" if title else str(key))
    return tables


def _holds_mappings(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, Mapping) for item in value)
