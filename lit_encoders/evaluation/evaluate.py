"""Several models on several tasks: figures with intervals over seeds, and paired comparisons over items."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lit_encoders.evaluation.bootstrap import Difference, Tally, check_items, paired_bootstrap, tally
from lit_encoders.evaluation.scores import Scores
from lit_encoders.evaluation.statistics import Interval, t_interval
from lit_encoders.evaluation.task_base import Task
from lit_encoders.modules.open_module import open_module


@dataclass(frozen=True)
class Figure:
    """A metric of a model on a task.

    Attributes:
        interval: mean over seeds with Student's interval; a task that draws nothing has one value.
        values: of each seed.
        seeded: whether the values depend on a seed.
    """

    interval: Interval
    values: list[float]
    seeded: bool


@dataclass(frozen=True)
class Comparison:
    """Two models on a task.

    Attributes:
        first: number of the one.
        second: number of the other.
        differences: metric -> the first less the second, over items.
        tallies: items won and lost by the first, over all and by group.
    """

    first: int
    second: int
    differences: dict[str, Difference]
    tallies: list[Tally]


@dataclass(frozen=True)
class TaskResult:
    """All models on a task.

    Attributes:
        task: which.
        num_items: tested.
        figures: for each model, metric -> figure.
        comparisons: of pairs of models.
    """

    task: Task
    num_items: int
    figures: list[dict[str, Figure]]
    comparisons: list[Comparison]

    def plain(self, models: Sequence[str]) -> dict[str, Any]:
        """The result in plain types, for JSON."""
        return {
            "kind": type(self.task).__name__.lower(),
            "protocol": self.task.protocol,
            "num_items": self.num_items,
            "main_metric": self.task.main_metric,
            "models": [
                {
                    "model": model,
                    "metrics": {
                        name: {
                            "mean": figure.interval.mean,
                            "half_width": figure.interval.half_width if len(figure.values) > 1 else None,
                            "values": figure.values,
                        }
                        for name, figure in figures.items()
                    },
                }
                for model, figures in zip(models, self.figures, strict=True)
            ],
            "comparisons": [
                {
                    "first": models[comparison.first],
                    "second": models[comparison.second],
                    "differences": {name: asdict(found) for name, found in comparison.differences.items()},
                    "items": [asdict(found) for found in comparison.tallies],
                }
                for comparison in self.comparisons
            ],
        }


def evaluate_models(
    models: Sequence[str],
    tasks: Sequence[Task],
    seeds: Sequence[int] = (0, 1, 2),
    pairs: Sequence[tuple[int, int]] = (),
    say: Callable[[str], None] = lambda text: None,
    ready: Callable[[], None] = lambda: None,
) -> list[TaskResult]:
    """Evaluate models on tasks.

    Args:
        models: folders or hub names.
        tasks: of any kind.
        seeds: of fine-tuning; a task that draws nothing is run once.
        pairs: numbers of models to compare.
        say: told of each run that ends.
        ready: called once all models and items are found fit, before the first run.

    Raises:
        ValueError: items cannot be read, are too few to compare models on, or a model is not fit for a task; all models
            are opened and all items are read before the first run.
    """
    for model in models:
        module = open_module(model)
        module.configure_model()
        for task in tasks:
            task.check(module)
    loaded = [task.load() for task in tasks]
    if pairs:
        for task, items in zip(tasks, loaded, strict=True):
            check_items(task.num_items(items), task.key)
    ready()
    results = []
    for task, items in zip(tasks, loaded, strict=True):
        drawn = list(seeds) if task.is_seeded else [0]
        runs: list[list[Scores]] = []
        for model in models:
            runs.append([])
            for seed in drawn:
                runs[-1].append(task.run(model, items, seed))
                value = runs[-1][-1].value(task_metric(task, runs[-1][-1]))
                say(f"{task.name}: {model}, seed {seed}: {task_metric(task, runs[-1][-1])} {value:.4f}")
        results.append(
            TaskResult(
                task,
                task.num_items(items),
                [_figures(scores, task.is_seeded) for scores in runs],
                [_compare(runs, first, second, task.groups(items)) for first, second in pairs],
            )
        )
    return results


def task_metric(task: Task, scores: Scores) -> str:
    """The metric of the main table; words without spans have no span F1."""
    return task.main_metric if task.main_metric in scores.metrics else "accuracy"


def _figures(runs: Sequence[Scores], seeded: bool) -> dict[str, Figure]:
    every = {name: [scores.value(name) for scores in runs] for name in runs[0].metrics}
    return {name: Figure(t_interval(values), values, seeded) for name, values in every.items()}


def _compare(runs: Sequence[Sequence[Scores]], first: int, second: int, groups: Sequence[str]) -> Comparison:
    ours, theirs = runs[first], runs[second]
    # F1 of single classes and types are in the figures; intervals of all of them would find something by chance.
    names = [name for name in ours[0].metrics if not name.startswith("f1/") and name in theirs[0].metrics]
    differences = {name: paired_bootstrap(ours, theirs, name) for name in names}
    return Comparison(first, second, differences, tally(ours, theirs, groups if any(groups) else None))


@dataclass(frozen=True)
class Milestone:
    """An export of a run on the way.

    Attributes:
        tokens: that the run had read.
        folder: of the model.
    """

    tokens: float
    folder: Path


def milestones_of(run: Path) -> list[Milestone]:
    """Milestone exports of a run folder, by their tokens; none where there are none.

    The end of the run is a milestone too, where its summary says after how many tokens.
    """
    import json
    import re

    found = []
    for folder in (run / "export").glob("tokens-*"):
        number = re.fullmatch(r"tokens-(\d+(?:\.\d+)?)([KMBT]?)", folder.name)
        if number and (folder / "config.json").is_file():
            scale = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[number[2]]
            found.append(Milestone(float(number[1]) * scale, folder))
    summary = run / "summary.json"
    if summary.is_file() and (run / "export" / "config.json").is_file():
        tokens = json.loads(summary.read_text(encoding="utf-8")).get("tokens")
        if tokens and all(tokens > known.tokens for known in found):
            found.append(Milestone(float(tokens), run / "export"))
    return sorted(found, key=lambda milestone: milestone.tokens)


def last_doubling(milestones: Sequence[Milestone]) -> tuple[int, int] | None:
    """Numbers of the last milestone and of the newest one with at most half of its tokens; None where there is none.

    >>> last_doubling([Milestone(tokens, Path()) for tokens in (10, 20, 35, 50)])
    (3, 1)
    """
    last = len(milestones) - 1
    half = [place for place, known in enumerate(milestones) if known.tokens <= milestones[last].tokens / 2]
    return (last, half[-1]) if half else None
