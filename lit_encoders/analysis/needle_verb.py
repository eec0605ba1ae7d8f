"""``lit-encoders needle``: what a probe finds of hidden facts in a model's embeddings, as a table and a picture."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lit_encoders.analysis.needle import CONTROL_LENGTH, CONTROL_SHARE, Haystack, measure_needle
from lit_encoders.analysis.needle_documents import POSITIONS, Position, make_filler
from lit_encoders.evaluation.statistics import Share
from lit_encoders.evaluation.tables import markdown
from lit_encoders.modules.open_module import open_module
from lit_encoders.plots import heat_map
from lit_encoders.weights.combine import new_folder
from lit_encoders.weights.numbers import Numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LENGTHS = (128, 256, 512)
# Fewer leave an interval of more than 20 points to each side.
LEAST_PAIRS = 20


def needle_verb(
    model: str,
    output: Path,
    lengths: Numbers | None = None,
    positions: str = "start,middle,end",
    pairs: int = 100,
    fit: int = 100,
    text: str | None = None,
    seed: int = 0,
    slots: int = 4096,
) -> str:
    """Ask whether a fact is in a document, with a small probe on a model's resting encoder.

    Args:
        model: folder or hub name.
        output: folder to make, for needle.csv, needle.json and needle.png.
        lengths: of the documents in tokens; 128,256,512 if not given (the paper has 512 to 8,192).
        positions: where the fact stands, out of start,middle,end.
        pairs: tested at each length and position, half of them with a fact that is not there.
        fit: documents at each length and position that the probe is fitted on, each with both questions.
        text: file to fill documents with, as data.train takes it; sentences of templates if not given.
        seed: of facts, filler and shuffled labels.
        slots: tokens that are read at once.

    Raises:
        ValueError: see `measure_needle`; or too few pairs for an interval, or no such position.
    """
    if output.exists():
        raise ValueError(f"output must be a folder that does not exist yet, got '{output}'")
    wanted = _whole_lengths(LENGTHS if lengths is None else lengths)
    places = _positions(positions)
    if pairs < LEAST_PAIRS or pairs % 2:
        raise ValueError(f"pairs must be an even number of at least {LEAST_PAIRS} for an interval, got {pairs}")
    if fit < LEAST_PAIRS:
        raise ValueError(f"fit must be at least {LEAST_PAIRS} documents for a probe to learn from, got {fit}")
    module = open_module(model, on_gpu=True)
    filler = None if text is None else make_filler(module.tokenizer, text)
    found = measure_needle(module, wanted, places, pairs=pairs, fit=fit, filler=filler, seed=seed, slots=slots)
    settings = {"model": model, "lengths": wanted, "positions": places, "pairs": pairs, "fit": fit, "text": text}
    versions = {name: version(name) for name in ("lit_encoders", "torch", "transformers", "scikit-learn")}
    whole = {**settings, "seed": seed, **asdict(found), "versions": versions}
    with new_folder(output) as folder:
        (folder / "needle.csv").write_text(as_csv(found), encoding="utf-8")
        (folder / "needle.json").write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
        grid_figure(found).savefig(folder / "needle.png", dpi=150, bbox_inches="tight")
    files = ", ".join(str(output / f"needle.{ending}") for ending in ("csv", "json", "png"))
    return f"{haystack_table(found)}\nWritten: {files}"


def _whole_lengths(numbers: Sequence[float]) -> list[int]:
    lengths = [int(number) for number in numbers]
    if lengths != list(numbers) or len(set(lengths)) < len(lengths):
        got = ",".join(f"{number:g}" for number in numbers)
        raise ValueError(f"lengths must be whole numbers of tokens, each once, got {got}")
    return lengths


def _positions(text: str) -> list[Position]:
    names = [name.strip() for name in text.split(",")]
    if len(set(names)) < len(names) or not set(names) <= set(POSITIONS):
        raise ValueError(f"positions must be out of {','.join(POSITIONS)}, each once, got {text!r}")
    return cast("list[Position]", names)


def haystack_table(found: Haystack) -> str:
    """Answers by length and position, then the two controls and what they say."""
    rows = []
    for length in _lengths(found):
        cells = [cell for cell in found.cells if cell.length == length]
        rows += [[str(length), cell.position, *_columns(cell.correct)] for cell in cells]
        if len(cells) > 1:
            rows.append([str(length), "all", *_columns(found.over_positions(length))])
    table = markdown(["length", "position", "accuracy (%)", "95 % interval", "pairs"], rows)
    steps = f"in at most {found.steps} steps" if found.converged else f"not in {found.steps} steps: read no number here"
    chance = "holds 50 %" if found.shuffled.holds(0.5) else "leaves out 50 %, as one seed in 20 does by chance"
    reached = found.control.value >= CONTROL_SHARE
    verdict = (
        "reached" if reached else "not reached: fit on more documents, or chance above says nothing of the encoder"
    )
    return "\n".join(
        [
            "Is the fact in the document? Answers of a probe on the resting encoder; chance is 50 %",
            "",
            table,
            "",
            f"Shuffled labels: {_said(found.shuffled)}; the interval {chance}.",
            f"Mean token embeddings of {CONTROL_LENGTH}-token texts, without the encoder: {_said(found.control)}; "
            f"{CONTROL_SHARE:.0%} wanted, {verdict}.",
            f"Probes: logistic regressions on [d, q, d * q, |d - q|]; converged {steps}.",
        ]
    )


def as_csv(found: Haystack) -> str:
    """A line for each length and position; shares are of 1."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["length", "position", "accuracy", "low", "high", "pairs"])
    for cell in found.cells:
        numbers = [repr(value) for value in (cell.correct.value, cell.correct.low, cell.correct.high)]
        lines.writerow([cell.length, cell.position, *numbers, cell.correct.trials])
    return text.getvalue()


def grid_figure(found: Haystack) -> Figure:
    """Draw a row for each length and a column for each position; colours from chance to all right."""
    lengths = _lengths(found)
    positions = list(dict.fromkeys(cell.position for cell in found.cells))
    by_place = {(cell.length, cell.position): cell.correct for cell in found.cells}
    values = [[100 * by_place[length, position].value for position in positions] for length in lengths]
    figure = heat_map(values, [f"{length} tokens" for length in lengths], positions, "right answers (%), 95 % interval")
    # Wide and high enough for what stands in a square.
    figure.set_size_inches(2.4 + 1.5 * len(positions), 1.4 + 0.6 * len(lengths))
    axes = figure.axes[0]
    # Colours of chance and below are one: noise is not to look like a finding.
    axes.images[0].set_clim(50, 100)
    axes.tick_params(axis="x", rotation=0)
    for row, length in enumerate(lengths):
        for column, position in enumerate(positions):
            share = by_place[length, position]
            label = f"{100 * share.value:.0f}\n{100 * share.low:.0f} to {100 * share.high:.0f}"
            colour = "black" if share.value > 0.8 else "white"
            axes.text(column, row, label, ha="center", va="center", fontsize=8, color=colour)
    return figure


def _lengths(found: Haystack) -> list[int]:
    return list(dict.fromkeys(cell.length for cell in found.cells))


def _columns(share: Share) -> list[str]:
    return [f"{100 * share.value:.1f}", f"{100 * share.low:.1f} to {100 * share.high:.1f}", str(share.trials)]


def _said(share: Share) -> str:
    value, interval, trials = _columns(share)
    return f"{value} % ({interval}; {trials} pairs)"
