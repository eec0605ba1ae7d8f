"""The report of the mask-ratio study: tables, curves, whether they still rise, and what it does not settle."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from lit_encoders.evaluation.statistics import Interval, t_interval
from lit_encoders.evaluation.tables import markdown, plain_interval, show_difference, show_value
from lit_encoders.plots import curves
from lit_encoders.studies.results import write_json, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Task -> figure, in [0, 1]; higher is better.
Measured = Mapping[str, float]
# Row -> seed -> milestone.
Runs = Mapping[str, Sequence[Sequence[Measured]]]

TASKS = {"classification": "classification (accuracy)", "retrieval": "retrieval (nDCG@10)"}


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        name: of its runs' folders.
        title: in the table; ``{low}``, ``{high}`` and ``{single_low}`` are mask ratios in per cent.
        single: the setting with its mask ratio, for a row that has one only.
        decoupled: whether each stream has an LM head of its own.
        distilled: streams that learn from the teacher.
        baseline: name of the row that it is compared to.
    """

    name: str
    title: str
    single: Literal["", "single_low", "high"] = ""
    decoupled: bool = False
    distilled: tuple[str, ...] = ()
    baseline: str = "single-low"


ROWS = (
    Row("single-low", "{single_low} % only", single="single_low", baseline=""),
    Row("single-high", "{high} % only", single="high"),
    Row("mixed-shared", "{low} % + {high} %, one head"),
    Row("mixed-decoupled", "{low} % + {high} %, two heads", decoupled=True),
    Row("kd-low", "two heads, teacher on {low} %", decoupled=True, distilled=("low",), baseline="mixed-decoupled"),
    Row("kd-both", "two heads, teacher on both", decoupled=True, distilled=("low", "high"), baseline="mixed-decoupled"),
)
# Further differences that the paper's rows are about.
PAIRS = (("mixed-decoupled", "mixed-shared"), ("kd-both", "kd-low"), ("single-high", "single-low"))

HOW = """\
The teacher is the base with an MLM head, trained on the definitions of all terms that are not tested, at {teacher} %
masking. The student is what pruning leaves of it, {layers} layers. Each run trains that student on the same text and,
for one seed, in the same order; the learning rate stays after its warm-up, so that milestones are comparable.

Classification: logistic regression on the resting encoder's mean embeddings of definitions, into the branches of the
ontology. Retrieval: the definition of a synonym among those of all tested terms, by cosine after one matrix that was
fitted with in-batch negatives. Both are fitted on {fit:,} terms and tested on {test:,} others, whose definitions are in
no pretraining text."""

NOT_SETTLED = """\
- Not the paper's ranking: it compares ratios at saturation, beyond 1T tokens, and says that a comparison at a small
  budget mixes speed of convergence with final quality. These runs end at {tokens:,} tokens. A ranking below saturation
  need not be the one above it.
- The students begin as pruned models and recover from it; the paper's table 1 is of models trained at full length.
- A low ratio has fewer targets for the same tokens: at {low:g} % {part:.2g} of those at {high:g} %. Equal tokens are
  not equal targets.
- Nothing is fine-tuned: linear probes on resting encoders say what the embeddings have at hand. The paper fine-tunes.
- One text, one split, one base; the intervals are over {seeds} seeds alone. Of {cells} differences about one in twenty
  leaves out 0 by chance.
- One temperature, one direction and one weight of the teacher, none of them tuned."""


def titles(facts: Mapping[str, Any]) -> dict[str, str]:
    """Title of each row, with the ratios of the settings."""
    ratios = {name: f"{100 * facts[name]:g}" for name in ("low", "high", "single_low")}
    return {row.name: row.title.format(**ratios) for row in ROWS}


def last_gain(seeds: Sequence[Sequence[Measured]], task: str) -> Interval:
    """What the tokens from the last milestone but one to the last have added, over seeds."""
    return t_interval([milestones[-1][task] - milestones[-2][task] for milestones in seeds])


def difference(runs: Runs, row: str, reference: str, task: str, milestone: int = -1) -> Interval:
    """A row less another one, seed by seed, at a milestone."""
    pairs = zip(runs[row], runs[reference], strict=True)
    return t_interval([ours[milestone][task] - theirs[milestone][task] for ours, theirs in pairs])


def compared(runs: Runs) -> list[tuple[str, str]]:
    """Pairs of rows that are compared: each row with its baseline, and those of `PAIRS`."""
    pairs = [(row.name, row.baseline) for row in ROWS if row.baseline] + list(PAIRS)
    return [pair for pair in dict.fromkeys(pairs) if set(pair) <= set(runs)]


def verdict(runs: Runs) -> str:
    """Sentences on which curves still rise, and what that means for the ranking."""
    gains = {(row, task): last_gain(seeds, task) for row, seeds in runs.items() for task in TASKS}
    if all(math.isinf(gain.half_width) for gain in gains.values()):
        return "Whether the curves still rise cannot be said: one seed gives no intervals."
    rising = sum(gain.differs and gain.mean > 0 for gain in gains.values())
    falling = sum(gain.differs and gain.mean < 0 for gain in gains.values())
    flat = len(gains) - rising - falling
    said = (
        f"Between the last two milestones {rising} of {len(gains)} curves rise by more than their interval, {falling} "
        f"fall, and {flat} cannot be told from flat."
    )
    return f"{said} A ranking below saturation need not be the one at saturation."


def value_table(references: Mapping[str, Measured], runs: Runs, names: Mapping[str, str]) -> str:
    """Figures at the last milestone, with those of the models that the runs begin with."""
    rows = [[name, *(f"{measured[task]:.3f}" for task in TASKS)] for name, measured in references.items()]
    rows += [
        [names[row], *(show_value(t_interval([seed[-1][task] for seed in seeds])) for task in TASKS)]
        for row, seeds in runs.items()
    ]
    return markdown(["", *TASKS.values()], rows)


def difference_table(runs: Runs, names: Mapping[str, str]) -> str:
    """Differences of rows at the last milestone."""
    rows = [
        [f"{names[row]} - {names[other]}", *(show_difference(difference(runs, row, other, task)) for task in TASKS)]
        for row, other in compared(runs)
    ]
    return markdown(["", *TASKS.values()], rows)


def milestone_table(milestones: Sequence[float], runs: Runs, names: Mapping[str, str], task: str) -> str:
    """Mean figures at every milestone, and the gain between the last two."""
    rows = [
        [
            names[row],
            *(f"{fmean(seed[place][task] for seed in seeds):.3f}" for place in range(len(milestones))),
            show_difference(last_gain(seeds, task)),
        ]
        for row, seeds in runs.items()
    ]
    return markdown([TASKS[task], *(f"{tokens:,.0f}" for tokens in milestones), "last gain"], rows)


def picture(
    milestones: Sequence[float], references: Mapping[str, Measured], runs: Runs, names: Mapping[str, str]
) -> Figure:
    """Mean figures against tokens, a panel for each task; all begin at the student."""
    panels = {}
    for task, title in TASKS.items():
        start = (0.0, references["student"][task])
        panels[title] = {
            names[row]: [
                start,
                *((tokens, fmean(seed[place][task] for seed in seeds)) for place, tokens in enumerate(milestones)),
            ]
            for row, seeds in runs.items()
        }
    return curves(panels, "tokens", "held-out terms")


def as_csv(milestones: Sequence[float], seeds: Sequence[int], references: Mapping[str, Measured], runs: Runs) -> str:
    """A line for each figure that was measured."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["row", "seed", "tokens", "task", "value"])
    lines.writerows([name, "", "", task, measured[task]] for name, measured in references.items() for task in TASKS)
    lines.writerows(
        [row, seed, tokens, task, measured[task]]
        for row, every in runs.items()
        for seed, found in zip(seeds, every, strict=True)
        for tokens, measured in zip(milestones, found, strict=True)
        for task in TASKS
    )
    return text.getvalue()


def report(
    milestones: Sequence[float],
    references: Mapping[str, Measured],
    runs: Runs,
    facts: Mapping[str, Any],
    command: str,
) -> tuple[str, str]:
    """The tables alone, and the whole report.

    Args:
        milestones: numbers of tokens.
        references: figures of the models that the runs begin with, "student" among them.
        runs: figures of every row, seed and milestone.
        facts: settings, versions and figures of the text.
        command: that made it.
    """
    names = titles(facts)
    seeds = len(next(iter(runs.values())))
    short = "\n\n".join([value_table(references, runs, names), difference_table(runs, names), verdict(runs)])
    apart = ("versions", "text", "student", "training_seconds")
    settings = {key: value for key, value in facts.items() if key not in apart}
    how = HOW.format(
        teacher=f"{100 * facts['teacher_mask_ratio']:g}",
        layers=facts["student_layers"],
        fit=facts["fit_terms"],
        test=facts["test_terms"],
    )
    not_settled = NOT_SETTLED.format(
        tokens=int(milestones[-1]),
        low=100 * facts["low"],
        high=100 * facts["high"],
        part=facts["low"] / facts["high"],
        seeds=seeds,
        cells=len(compared(runs)) * len(TASKS),
    )
    sections = [
        "# Masking ratios, heads and a teacher: a small study",
        f"Held-out terms at {milestones[-1]:,.0f} tokens; higher is better. Intervals: 95 %, over {seeds} "
        f"seed{'s' if seeds > 1 else ''}.\nAfter UltraBERT (Park, Lee, Kang 2026).",
        short,
        "## Against tokens",
        *(milestone_table(milestones, runs, names, task) for task in TASKS),
        "![figures against tokens](curves.png)",
        "## How it was made",
        f"`{command}`" if command else "",
        how,
        f"Student: {facts['student']}. Text: {facts['text']['pretraining']:,} definitions.",
        "Mean seconds of a training run: "
        + ", ".join(f"{names[row]} {seconds:.0f}" for row, seconds in facts["training_seconds"].items())
        + ".",
        "\n".join(f"- {name} {number}" for name, number in facts["versions"].items()),
        "\n".join(f"- {key}: {value}" for key, value in settings.items()),
        "## What this does not settle",
        not_settled,
    ]
    return short, "\n\n".join(section for section in sections if section) + "\n"


def write_report(
    output: Path,
    milestones: Sequence[float],
    references: Mapping[str, Measured],
    runs: Runs,
    facts: Mapping[str, Any],
    command: str,
) -> str:
    """Write ``report.md``, ``results.csv``, ``results.json`` and ``curves.png``; see `report`.

    Returns:
        The tables, with where the report is.
    """
    short, whole = report(milestones, references, runs, facts, command)
    write_text(output / "report.md", whole)
    write_text(output / "results.csv", as_csv(milestones, facts["seeds"], references, runs))
    cells = [
        {"row": row, "reference": other, "task": task, **plain_interval(difference(runs, row, other, task))}
        for row, other in compared(runs)
        for task in TASKS
    ]
    measured = {"references": dict(references), "rows": dict(runs), "differences": cells}
    write_json(output / "results.json", {"settings": dict(facts), "milestones": list(milestones), **measured})
    beside = output / ".curves.png"
    picture(milestones, references, runs, titles(facts)).savefig(beside, dpi=150)
    beside.replace(output / "curves.png")
    return f"{short}\n{output / 'report.md'}"
