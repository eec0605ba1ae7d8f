"""The report of the alignment study: tables, settings, and what it does not settle."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from lit_encoders.evaluation.tables import markdown, plain_interval, show_difference
from lit_encoders.studies.alignment_table import Cell, Column, Family, ModelLosses, base_losses, study_cells
from lit_encoders.studies.results import write_json, write_text

HOW = """\
The base is the encoder with its MLM head warmed up, then trained a little on the general language, so that there is
something to forget. Each run gets equal numbers of tokens of its languages, drawn by its seed. Freezing and L2-SP are
used in the families' experts. Reverted and soup rows are made of the weights of trained models. The middle, layers
{middle}, stands for the paper's 9:28 of 34.

Pages are held out in every language at once. Lines that were left in the general language are dropped from the others,
and held-out lines that also stand on a training page are dropped."""

NOT_SETTLED = """\
- Nothing about the paper's own model: this is an encoder with MLM and {tokens:,} tokens a run, not a decoder of 34
  layers with 5 billion. Which layers matter may differ.
- The intervals are over seeds (text drawn, its order, masks, dropout), on one held-out text and one base; others may
  give other numbers. With {cells} cells, about one in twenty may differ by chance alone.
- MLM loss is all that is measured: nothing is said of tasks.
- Every trained run has the same number of steps: the dense run sees each language less often than an expert does, and
  the experts together cost as much as {families} dense runs.
- The learning rate is one for all and was not tuned for any of them; a strategy that holds weights back may want
  another.
- The vocabulary of the example's base is uncased English: words of other languages fall into many pieces, without their
  accents, and a piece is easier to guess from its neighbours than a word is.
- Held-out pages are of the same handbook as training pages: a loss that falls shows the handbook's terms as well as the
  language.
- The paper's soup averages five experts, this one {families}: each of them is diluted less."""


def verdict(cells: Sequence[Cell]) -> str:
    """One sentence on what the study can tell at all."""
    count = sum(cell.interval.differs for cell in cells)
    if all(math.isinf(cell.interval.half_width) for cell in cells):
        return "The study has no power: one seed gives no intervals."
    if count == 0:
        return "The study has no power: no cell differs from the base by more than its interval."
    return f"{count} of {len(cells)} cells differ from the base by more than their interval (marked *)."


def heads(families: Sequence[Family], general: str) -> list[str]:
    """Column heads, with their languages.

    >>> heads([Family("celtic", ("cy",), ("br",))], "en")
    ['trained (cy)', 'general (en)', 'unseen (br)']
    """
    names = {
        "trained": [language for family in families for language in family.trained],
        "general": [general],
        "unseen": [language for family in families for language in family.unseen],
    }
    return [f"{column} ({', '.join(languages)})" for column, languages in names.items()]


def table(cells: Sequence[Cell], column_heads: Sequence[str], base: Mapping[Column, float] | None = None) -> str:
    """Cells as a table; with the base's losses on top where they are the reference."""
    titles = list(dict.fromkeys((cell.row, cell.reference) for cell in cells))
    by_place = {(cell.row, cell.column): show_difference(cell.interval) for cell in cells}
    rows = [["base (loss)", *(f"{base[column]:.3f}" for column in get_args(Column))]] if base else []
    for title, reference in titles:
        name = title if base else f"{title} - {reference}"
        rows.append([name, *(by_place[title, column] for column in get_args(Column))])
    return markdown(["", *column_heads], rows)


def as_csv(cells: Sequence[Cell], base: Mapping[Column, float]) -> str:
    """A line for each cell; the base's own losses first, with nothing to compare to."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["row", "column", "reference", "value", "half_width", "seeds", "differs"])
    lines.writerows(["base", column, "", loss, "", "", ""] for column, loss in base.items())
    for cell in cells:
        interval = cell.interval
        half_width = "" if math.isinf(interval.half_width) else interval.half_width
        lines.writerow(
            [cell.row, cell.column, cell.reference, interval.mean, half_width, interval.num_values, interval.differs]
        )
    return text.getvalue()


def as_plain(cell: Cell) -> dict[str, Any]:
    """A cell for JSON, which has no infinity."""
    return {"row": cell.row, "column": cell.column, "reference": cell.reference, **plain_interval(cell.interval)}


def report(
    families: Sequence[Family],
    general: str,
    base: Mapping[str, float],
    losses: Mapping[int, ModelLosses],
    facts: Mapping[str, Any],
    command: str,
) -> tuple[str, str]:
    """The table alone, and the whole report.

    Args:
        families: of the study.
        general: the language that the base knows.
        base: its losses by language.
        losses: of each seed's models.
        facts: settings, versions and figures of the text.
        command: that made it.
    """
    against_base, against_baselines = study_cells(families, general, base, losses)
    column_heads = heads(families, general)
    of_base = base_losses(base, families, general)
    first = table(against_base, column_heads, of_base)
    settings = {key: value for key, value in facts.items() if key not in ("versions", "text", "families")}
    not_settled = NOT_SETTLED.format(
        tokens=facts["steps"] * facts["slots"], cells=len(against_base), families=len(families)
    )
    over = f"over {len(losses)} seed{'s' if len(losses) > 1 else ''}"
    sections = [
        "# Alignment of expert models: a small study",
        f"Held-out MLM loss, nats per target, as difference from the base; lower is better. Intervals: 95 %, {over}.\n"
        "A cell is the mean over families of the mean over their languages; an expert counts on its own family alone.\n"
        "After Ahuja, Blevins (2026), arXiv:2606.00284.",
        first,
        verdict(against_base),
        "Strategies against the baseline that they answer to, seed by seed:",
        table(against_baselines, column_heads),
        "## How it was made",
        f"`{command}`" if command else "",
        HOW.format(middle=facts["middle"]),
        "\n".join(f"- {name} {number}" for name, number in facts["versions"].items()),
        "\n".join(f"- {key}: {value}" for key, value in settings.items()),
        "\n".join(f"- {f.name}: trained {', '.join(f.trained)}; unseen {', '.join(f.unseen)}" for f in families),
        "## What this does not settle",
        not_settled,
    ]
    return f"{first}\n\n{verdict(against_base)}", "\n\n".join(section for section in sections if section) + "\n"


def write_report(
    output: Path,
    families: Sequence[Family],
    general: str,
    base: Mapping[str, float],
    losses: Mapping[int, ModelLosses],
    facts: Mapping[str, Any],
    command: str,
) -> str:
    """Write ``report.md``, ``results.csv`` and ``results.json``; see `report`.

    Returns:
        The table, with where the report is.
    """
    short, whole = report(families, general, base, losses, facts, command)
    cells = [cell for part in study_cells(families, general, base, losses) for cell in part]
    write_text(output / "report.md", whole)
    write_text(output / "results.csv", as_csv(cells, base_losses(base, families, general)))
    plain = {"settings": dict(facts), "base": dict(base), "losses": dict(losses), "cells": [as_plain(c) for c in cells]}
    write_json(output / "results.json", plain)
    return f"{short}\n{output / 'report.md'}"
