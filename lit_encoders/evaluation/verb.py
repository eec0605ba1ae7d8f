"""``lit-encoders evaluate --model M [M2 ...] --tasks T``."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from lit_encoders.evaluation.bootstrap import Difference
from lit_encoders.evaluation.evaluate import (
    Comparison,
    Figure,
    Milestone,
    TaskResult,
    evaluate_models,
    last_doubling,
    milestones_of,
)
from lit_encoders.evaluation.presets import PRESETS
from lit_encoders.evaluation.tables import markdown, show_value
from lit_encoders.evaluation.tasks import Task, make_task, override


def evaluate_verb(
    model: list[str],
    tasks: list[str],
    output: Path | None = None,
    seeds: str = "0,1,2",
    compare: bool | None = None,
) -> str:
    """Evaluate models on tasks: figures with intervals, and who won which items.

    Args:
        model: folders, hub names or example:NAME; or one run folder, whose milestone exports are evaluated.
        tasks: files of tasks, or names of presets.
        output: JSON file to make; without it only the table is printed.
        seeds: of fine-tuning, such as 0,1,2.
        compare: whether each further model is compared with the first, item by item, which needs 200 test items; it is
            if not said otherwise.

    Raises:
        ValueError: a task, a model or a file cannot be used; before anything is trained.
    """
    if output is not None and output.exists():
        raise ValueError(f"output must be a file that does not exist yet, got '{output}'")
    if not model:
        raise ValueError("model must be at least one, got none")
    numbers = _seeds(seeds)
    chosen = read_tasks(tasks)
    names, milestones = _models(model)
    pairs = [] if compare is False else _pairs(len(names), milestones)
    results = evaluate_models(names, chosen, numbers, pairs, _say, lambda: _make_place(output))
    if output is not None:
        _write(output, names, milestones, numbers, results)
    text = "\n\n".join(_section(result, names, milestones) for result in results)
    return text if output is None else f"{text}\n\nWritten: {output}"


def read_tasks(names: Sequence[str]) -> list[Task]:
    """Read files of tasks and presets.

    Args:
        names: paths of YAML files (a mapping of names to tasks), or names of presets.

    Raises:
        ValueError: a file cannot be read, or a task in it is not what it has to be.
    """
    if not names:
        raise ValueError(f"tasks must be at least one file or preset ({', '.join(PRESETS)}), got none")
    found: list[Task] = []
    for name in names:
        if name in PRESETS:
            found.append(PRESETS[name])
        elif Path(name).is_file():
            found += _tasks_of_file(Path(name))
        else:
            near = get_close_matches(name, PRESETS, n=1)
            hint = f"; {near[0]}?" if near else ""
            raise ValueError(f"tasks must be files or presets ({', '.join(PRESETS)}), got {name!r}{hint}")
    twice = [task.name for place, task in enumerate(found) if task.name in [known.name for known in found[:place]]]
    if twice:
        raise ValueError(f"tasks must have names that differ, got {twice[0]!r} twice")
    return found


class _Loader(yaml.SafeLoader):
    """Reads 5e-5 as the number that it is, and refuses a name that stands twice, of which YAML takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
        if twice is not None:
            raise ValueError(f"tasks must name each thing once, got {twice!r} twice in '{self.name}'")
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _tasks_of_file(path: Path) -> list[Task]:
    try:
        with path.open(encoding="utf-8") as file:
            given = yaml.load(file, _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"tasks must be YAML, got '{path}' ({' '.join(str(error).split())})") from None
    if not isinstance(given, dict) or not given:
        raise ValueError(f"tasks must be a mapping of names to tasks, got {type(given).__name__} in '{path}'")
    found: list[Task] = []
    for name, settings in given.items():
        if isinstance(settings, dict) and "preset" in settings:
            preset = settings["preset"]
            if not isinstance(preset, str) or preset not in PRESETS:
                raise ValueError(f"tasks.{name}.preset must be one of {', '.join(PRESETS)}, got {preset!r}")
            rest = {key: value for key, value in settings.items() if key != "preset"}
            found.append(override(PRESETS[preset], str(name), rest))
        elif (
            isinstance(settings, dict)
            and settings.get("kind") == "perplexity"
            and isinstance(settings.get("text"), dict)
        ):
            # One row for each named validation set.
            for part, text in settings["text"].items():
                found.append(make_task(f"{name}.{part}", {**settings, "text": text}))
        else:
            found.append(make_task(str(name), settings))
    return found


def _seeds(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in str(text).split(",")]
    except ValueError:
        raise ValueError(f"seeds must be whole numbers with commas, got {text!r}") from None
    if not all(0 <= number < 2**32 for number in numbers):
        raise ValueError(f"seeds must be from 0 to {2**32 - 1}, got {text!r}")
    if len(set(numbers)) != len(numbers):
        raise ValueError(f"seeds must differ, got {text!r}")
    return numbers


def _models(given: Sequence[str]) -> tuple[list[str], list[Milestone]]:
    """Sources of the models; of one run folder its milestones, too."""
    runs = [
        folder for folder in map(Path, given) if (folder / "export").is_dir() and not (folder / "config.json").is_file()
    ]
    if not runs:
        return list(given), []
    if len(given) > 1:
        # Several runs: their final models.
        return [str(Path(name) / "export") if Path(name) in runs else name for name in given], []
    milestones = milestones_of(runs[0])
    if not milestones:
        raise ValueError(f"model must be a run with exports in export/, got none in '{runs[0]}'")
    return [str(milestone.folder) for milestone in milestones], milestones


def _pairs(count: int, milestones: Sequence[Milestone]) -> list[tuple[int, int]]:
    """Which models are compared: each with the first; of a run its end with half of its tokens."""
    if milestones:
        doubling = last_doubling(milestones)
        return [] if doubling is None else [doubling]
    return [(place, 0) for place in range(1, count)]


def _section(result: TaskResult, names: Sequence[str], milestones: Sequence[Milestone]) -> str:
    metrics = [name for name in result.figures[0] if not name.startswith("f1/")]
    head = "tokens" if milestones else "model"
    labels = [f"{milestone.tokens:,.0f}" for milestone in milestones] or list(names)
    rows = [
        [label, *(_show(figures[metric]) for metric in metrics)]
        for label, figures in zip(labels, result.figures, strict=True)
    ]
    protocol = ", ".join(f"{key} {value}" for key, value in result.task.protocol.items())
    lines = [f"{result.task.name} ({result.num_items:,} items; {protocol})", "", markdown([head, *metrics], rows)]
    per_class = {name for figures in result.figures for name in figures if name.startswith("f1/")}
    if 0 < len(per_class) <= 30:
        table = [
            [name.removeprefix("f1/"), *(_show(f[name]) if name in f else "-" for f in result.figures)]
            for name in sorted(per_class)
        ]
        lines += ["", markdown(["F1", *labels], table)]
    lines += [line for comparison in result.comparisons for line in _comparison(comparison, labels, bool(milestones))]
    return "\n".join(lines)


def _comparison(comparison: Comparison, labels: Sequence[str], doubling: bool) -> list[str]:
    first, second = labels[comparison.first], labels[comparison.second]
    lines = ["", f"{first} against {second}: difference with its 95 % interval over items (paired bootstrap)"]
    lines += [f"  {name}: {show_difference(found)}" for name, found in comparison.differences.items()]
    for found in comparison.tallies:
        group = f" in {found.group!r}" if found.group else ""
        lines.append(f"  items{group}: {found.won} won, {found.lost} lost, {found.tied} tied")
    if doubling:
        flat = [name for name, found in comparison.differences.items() if not found.differs]
        said = f"{', '.join(flat)} cannot be told from saturated" if flat else "no metric is saturated"
        lines.append(f"  gain of the last doubling: {said}")
    return lines


def show_difference(found: Difference) -> str:
    """A difference with its interval; a star where the interval leaves out 0.

    >>> show_difference(Difference(0.1, 0.05, 0.15, 500)), show_difference(Difference(0.0, -0.05, 0.05, 500))
    ('+0.1000 [+0.0500, +0.1500] *', '+0.0000 [-0.0500, +0.0500]')
    """
    return f"{found.value:+.4f} [{found.low:+.4f}, {found.high:+.4f}]" + (" *" if found.differs else "")


def _show(figure: Figure) -> str:
    return show_value(figure.interval) if figure.seeded else f"{figure.values[0]:.3f}"


def _make_place(output: Path | None) -> None:
    """Make the output's folder, before hours of work would have nowhere to go."""
    try:
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"output must be in a folder that can be made, got '{output}' ({error.strerror})") from error


def _write(
    output: Path,
    names: Sequence[str],
    milestones: Sequence[Milestone],
    seeds: Sequence[int],
    results: Sequence[TaskResult],
) -> None:
    whole: dict[str, Any] = {
        "models": list(names),
        "tokens": [milestone.tokens for milestone in milestones] or None,
        "seeds": list(seeds),
        "versions": {name: version(name) for name in ("lit_encoders", "torch", "transformers", "lightning")},
        "tasks": {result.task.name: result.plain(names) for result in results},
    }
    beside = output.with_name(f".{output.name}")
    beside.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    os.replace(beside, output)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
