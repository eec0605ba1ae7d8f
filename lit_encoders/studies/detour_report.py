"""The report of the detour study: tables with intervals over seeds, and what it does not settle."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from lit_encoders.analysis.cka import known
from lit_encoders.evaluation.statistics import Interval, t_interval
from lit_encoders.evaluation.tables import markdown, plain_interval, show_difference, show_value
from lit_encoders.objectives import Objective
from lit_encoders.plots import curves, heat_map
from lit_encoders.studies.results import write_json, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Column -> figure.
Measured = Mapping[str, float]

COLUMNS = {
    "classification": "classification (accuracy)",
    "retrieval": "retrieval (nDCG@10)",
    "mlm_loss": "held-out MLM loss (nats)",
}
# What the study is about; the MLM loss is not: the detour ends higher in it.
TASKS = ("classification", "retrieval")


@dataclass(frozen=True)
class Arm:
    """A way through phase 1 and the decay.

    Attributes:
        name: of its runs' folders.
        title: in the tables.
        objective: of phase 1.
        source: name of the arm whose phase 1 it goes on from; its own where it trains one.
        frozen: name of the setting with the layers that rest; "" where none do.
        phase: in which they rest.
    """

    name: str
    title: str
    objective: Objective
    source: str
    frozen: str = ""
    phase: str = "first"


TWIN = Arm("twin", "twin (MLM, then MLM)", "mlm", "twin")
DETOUR = Arm("detour", "detour (CLM, then MLM)", "clm", "detour")
INTERVENTIONS = (
    Arm("low-rests", "low layers rest in the detour", "clm", "low-rests", "low"),
    Arm("mid-rests", "middle layers rest in the detour", "clm", "mid-rests", "mid"),
    Arm("low-rests-late", "low layers rest in the decay", "clm", "detour", "low", "decay"),
)
# Name -> (name of the setting with the layers, or the layers; part).
TRANSPLANTS: Mapping[str, tuple[str, str]] = {
    "low": ("low", "all"),
    "mid": ("mid", "all"),
    "high": ("high", "all"),
    "attention": ("all", "attention"),
    "mlp": ("all", "mlp"),
}
# Forms of CKA in the table: the paper's, and the one that neither bias nor a few large features decide.
SHOWN_FORMS = ("plain", "debiased, standardised")


def arms() -> tuple[Arm, ...]:
    """Every arm, the two of the main comparison first."""
    return (TWIN, DETOUR, *INTERVENTIONS)


@dataclass(frozen=True)
class Results:
    """What all runs measured.

    Attributes:
        rows: arm or transplant -> its figures, one for each seed; those with few seeds have the first ones.
        decays: arm -> length of the decay -> figures of each of the few seeds.
        distances: for each seed the distances of the detour from its twin, as `LayerDistance` has them.
        seconds: arm -> seconds of training, one for each seed.
    """

    rows: Mapping[str, Sequence[Measured]]
    decays: Mapping[str, Mapping[float, Sequence[Measured]]]
    distances: Sequence[Sequence[Mapping[str, Any]]]
    seconds: Mapping[str, Sequence[float]]


def titles(facts: Mapping[str, Any]) -> dict[str, str]:
    """Title of each row."""
    layers = {name: facts[name] for name in ("low", "mid", "high")}
    named = {arm.name: arm.title + (f" ({facts[arm.frozen]})" if arm.frozen else "") for arm in arms()}
    for name, (where, part) in TRANSPLANTS.items():
        named[f"transplant-{name}"] = (
            f"layers {layers[where]}" if where in layers else f"all {part.replace('mlp', 'MLP')}"
        )
    return named


def difference(ours: Sequence[Measured], theirs: Sequence[Measured], column: str) -> Interval:
    """A row less another, seed by seed, over the seeds that both have."""
    pairs = zip(ours, theirs, strict=False)
    return t_interval([one[column] - other[column] for one, other in pairs])


def count_seeds(seeds: Sequence[object]) -> str:
    """How many there are, in words.

    >>> count_seeds((3,)), count_seeds((3, 4))
    ('1 seed', '2 seeds')
    """
    return f"{len(seeds)} seed" + ("" if len(seeds) == 1 else "s")


def compared(results: Results) -> list[tuple[str, str]]:
    """Pairs of rows that are compared."""
    pairs = [("detour", "twin")]
    pairs += [(arm.name, other) for arm in INTERVENTIONS for other in ("detour", "twin")]
    pairs += [(f"transplant-{name}", "twin") for name in TRANSPLANTS]
    return [pair for pair in pairs if set(pair) <= set(results.rows)]


def value_table(base: Measured, results: Results, names: Mapping[str, str]) -> str:
    """Figures of the base and of every arm."""
    rows = [["base", *(f"{base[column]:.3f}" for column in COLUMNS)]]
    rows += [
        [
            f"{names[arm.name]}, {count_seeds(results.rows[arm.name])}",
            *(show_value(t_interval([seed[column] for seed in results.rows[arm.name]])) for column in COLUMNS),
        ]
        for arm in arms()
    ]
    return markdown(["", *COLUMNS.values()], rows)


def difference_table(results: Results, names: Mapping[str, str], pairs: Sequence[tuple[str, str]]) -> str:
    """Differences of rows, with intervals."""
    rows = [
        [
            f"{names[row]} - {names[other].partition(' (')[0]}",
            *(show_difference(difference(results.rows[row], results.rows[other], column)) for column in COLUMNS),
        ]
        for row, other in pairs
    ]
    return markdown(["", *COLUMNS.values()], rows)


def decay_table(results: Results, task: str) -> str:
    """Figures of both arms after each decay, and the detour less its twin."""
    rows = []
    for share in sorted(results.decays["twin"]):
        twin, detour = (results.decays[arm][share] for arm in ("twin", "detour"))
        means = [f"{fmean(seed[task] for seed in seeds):.3f}" for seeds in (twin, detour)]
        rows.append([f"{100 * share:g} %", *means, show_difference(difference(detour, twin, task))])
    return markdown([f"{COLUMNS[task]}: decay", "twin", "detour", "detour - twin"], rows)


def distance_table(results: Results) -> str:
    """Mean distance ``1 - CKA`` of each layer over seeds, that of the seed control, and their ratio."""
    by_place: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
    for items in results.distances:
        for item in items:
            by_place.setdefault((item["layer"], item["form"]), []).append(item)
    rows = []
    for layer in sorted({layer for layer, _ in by_place}):
        cells = []
        for form in SHOWN_FORMS:
            items = by_place[layer, form]
            distance, control = (mean_known(item[kind] for item in items) for kind in ("distance", "control"))
            cells += ["-" if value is None else f"{value:z.4f}" for value in (distance, control)]
            ratio = None if distance is None or control is None or control <= 0 else distance / control
            cells.append("-" if ratio is None else f"{ratio:z.2f}")
        rows.append([str(layer), *cells])
    return markdown(
        ["layer", *(f"{form}: {what}" for form in SHOWN_FORMS for what in ("1 - CKA", "seeds", "ratio"))], rows
    )


def mean_known(values: Iterable[float | None]) -> float | None:
    """The mean of those that are a number; None where none is."""
    found = [value for value in map(known, values) if value is not None]
    return fmean(found) if found else None


def verdict(results: Results) -> str:
    """Sentences on the main comparison, on its power, and on how many of all differences would show by chance."""
    found = {task: difference(results.rows["detour"], results.rows["twin"], task) for task in TASKS}
    if any(math.isinf(interval.half_width) for interval in found.values()):
        return "One seed gives no intervals: nothing can be said."
    said = []
    for task, interval in found.items():
        if interval.differs:
            said.append(
                f"In {task} the detour is {'above' if interval.mean > 0 else 'below'} its twin, beyond the interval."
            )
        else:
            said.append(
                f"In {task} the detour cannot be told from its twin: a difference below {interval.half_width:.3f} "
                "would not show."
            )
    every = [
        difference(results.rows[row], results.rows[other], task) for row, other in compared(results) for task in TASKS
    ]
    # One seed has no interval that could leave out anything.
    cells = [cell for cell in every if not math.isinf(cell.half_width)]
    said.append(
        f"Of all {len(cells)} intervals of differences in the two tasks {sum(cell.differs for cell in cells)} leave "
        "out 0; by chance alone about one in twenty does."
    )
    return " ".join(said)


HOW = """\
Base: the encoder with a new MLM head, warmed up while the encoder rests. Phase 1: {steps} steps of {slots} tokens, CLM
or MLM at {twin:g} % masking, the learning rate constant after {warmup} steps. Decay: MLM at {decay:g} % masking for
{share:g} % of these steps, the rate falling by 1 - sqrt to {final:g} % of its peak. For one seed all runs read the same
text in the same order; optimizer state goes on through the switch, and other decays go on from the same phase 1.

Classification: logistic regression on the resting encoder's mean embeddings of definitions, into the branches of the
ontology. Retrieval: the definition of a synonym among those of all tested terms, by cosine after one matrix that was
fitted with in-batch negatives. Both are fitted on {fit:,} terms and tested on {test:,} others, whose definitions are in
no pretraining text. CKA: linear, float64, means over tokens of {cka} held-out definitions; the control is the distance
of twins that differ in their seed alone."""

NOT_SETTLED = """\
- Not the paper's comparison: it trains on 10 to 50 billion tokens, this on {tokens:,}. At this length the encoder has
  hardly begun to learn the text, with either objective.
- The base is a sentence encoder, tuned for embeddings; every kind of pretraining costs it some of that first. The paper
  begins with encoders as pretraining left them, with their own MLM head.
- Nothing is fine-tuned: linear probes on resting encoders say what the embeddings have at hand. The paper fine-tunes.
- Equal tokens are not equal compute here: CLM predicts every token, MLM {twin:g} % of them; a run of the detour, its
  decay included, took {ratio:.2f} times as long as one of its twin.
- One text, one split, one base, one learning rate for both arms; the intervals are over {seeds} ({few} for
  interventions, decays and transplants) and hold for these alone.
- Controls of neighbouring seeds share twins, so that the CKA control's spread is not one of independent pairs.
- A transplant puts layers beside others that they were not trained with; what is lost so is in its figure too."""


def picture(results: Results) -> Figure:
    """Mean figures of both arms against the length of the decay, a panel for each column."""
    panels = {
        title: {
            arm: [(100 * share, fmean(seed[column] for seed in seeds[share])) for share in sorted(seeds)]
            for arm, seeds in results.decays.items()
        }
        for column, title in COLUMNS.items()
    }
    return curves(panels, "decay (% of phase 1)", "held-out terms")


def view_picture(results: Results) -> Figure:
    """Mean distances of all layers, by each form, between arms and between seeds."""
    rows: dict[str, list[float]] = {}
    for kind, title in (("distance", "detour - twin"), ("control", "seeds")):
        by_place: dict[tuple[str, int], list[float]] = {}
        for items in results.distances:
            for item in items:
                if item[kind] is not None:
                    by_place.setdefault((item["form"], item["layer"]), []).append(item[kind])
        for form, layer in sorted(by_place):
            mean = mean_known(by_place[form, layer])
            # Left white.
            rows.setdefault(f"{form}: {title}", []).append(math.nan if mean is None else mean)
    columns = [str(layer) for layer in range(max(map(len, rows.values())))]
    return heat_map(list(rows.values()), list(rows), columns, "distance 1 - CKA, by layer")


def report(base: Measured, results: Results, facts: Mapping[str, Any], command: str) -> tuple[str, str]:
    """The tables alone, and the whole report.

    Args:
        base: figures of the model that everything begins with.
        results: of all runs.
        facts: settings, versions and figures of the text.
        command: that made it.
    """
    names = titles(facts)
    pairs = compared(results)
    main, interventions = pairs[:1], [pair for pair in pairs[1:] if not pair[0].startswith("transplant")]
    transplants = [pair for pair in pairs if pair[0].startswith("transplant")]
    short = "\n\n".join(
        [
            value_table(base, results, names),
            difference_table(results, names, [*main, *interventions]),
            verdict(results),
        ]
    )
    seconds = {arm: fmean(every) for arm, every in results.seconds.items()}
    how = HOW.format(
        steps=facts["steps"],
        slots=facts["slots"],
        twin=100 * facts["twin_mask_ratio"],
        warmup=facts["warmup_steps"],
        decay=100 * facts["decay_mask_ratio"],
        share=100 * facts["decay_share"],
        final=100 * facts["final_share"],
        fit=facts["fit_terms"],
        test=facts["test_terms"],
        cka=facts["cka_texts"],
    )
    not_settled = NOT_SETTLED.format(
        tokens=facts["steps"] * facts["slots"],
        twin=100 * facts["twin_mask_ratio"],
        ratio=seconds["detour"] / seconds["twin"],
        seeds=count_seeds(facts["seeds"]),
        few=len(facts["few_seeds"]),
    )
    settings = {key: value for key, value in facts.items() if key not in ("versions", "text")}
    sections = [
        "# The CLM detour against its twin: a small study",
        "Held-out terms; in the two tasks higher is better. Intervals: 95 %, over seeds; * leaves out 0.\n"
        "After Touchent, de la Clergerie (2026), arXiv:2605.12438.",
        short,
        "## Other decays",
        *(decay_table(results, task) for task in COLUMNS),
        "![figures against the length of the decay](decays.png)",
        "## Layers of the detour in its twin",
        difference_table(results, names, [*main, *transplants]),
        "## Where the two see text differently",
        distance_table(results),
        "![distances of all layers](views.png)",
        "## How it was made",
        f"`{command}`" if command else "",
        how,
        f"Text: {facts['text']['pretraining']:,} definitions. Mean seconds of a training run, other runs beside it: "
        + ", ".join(f"{arm} {value:.0f}" for arm, value in seconds.items())
        + ".",
        "\n".join(f"- {name} {number}" for name, number in facts["versions"].items()),
        "\n".join(f"- {key}: {value}" for key, value in settings.items()),
        "## What this does not settle",
        not_settled,
    ]
    return short, "\n\n".join(section for section in sections if section) + "\n"


def as_csv(base: Measured, results: Results, seeds: Sequence[int]) -> str:
    """A line for each figure that was measured."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["row", "decay", "seed", "measure", "value"])
    lines.writerows(["base", "", "", column, base[column]] for column in COLUMNS)
    lines.writerows(
        [row, "", seed, column, found[column]]
        for row, every in results.rows.items()
        for seed, found in zip(seeds, every, strict=False)
        for column in COLUMNS
    )
    lines.writerows(
        [row, share, seed, column, found[column]]
        for row, shares in results.decays.items()
        for share, every in sorted(shares.items())
        for seed, found in zip(seeds, every, strict=False)
        for column in COLUMNS
    )
    return text.getvalue()


def write_report(output: Path, base: Measured, results: Results, facts: Mapping[str, Any], command: str) -> str:
    """Write ``report.md``, ``results.csv``, ``results.json``, ``decays.png`` and ``views.png``; see `report`.

    Returns:
        The tables, with where the report is.
    """
    short, whole = report(base, results, facts, command)
    write_text(output / "report.md", whole)
    write_text(output / "results.csv", as_csv(base, results, facts["seeds"]))
    cells = [
        {"row": row, "reference": other, "measure": column, **plain_interval(interval)}
        for row, other in compared(results)
        for column in COLUMNS
        for interval in [difference(results.rows[row], results.rows[other], column)]
    ]
    distances = [
        [{**item, **{kind: known(item[kind]) for kind in ("distance", "control")}} for item in items]
        for items in results.distances
    ]
    measured = {"base": dict(base), "rows": dict(results.rows), "decays": dict(results.decays)}
    more = {"differences": cells, "distances": distances}
    write_json(output / "results.json", {"settings": dict(facts), **measured, **more})
    for name, figure in (("decays.png", picture(results)), ("views.png", view_picture(results))):
        beside = output / f".{name}"
        figure.savefig(beside, dpi=150, bbox_inches="tight", format="png")
        beside.replace(output / name)
    return f"{short}\n{output / 'report.md'}"
