"""``lit-encoders benchmark --model M --suite mteb --tasks beir``: other people's benchmarks, run by their packages."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

from lit_encoders.evaluation.embeddings import Pooling
from lit_encoders.evaluation.finetuning import FineTuning
from lit_encoders.evaluation.mteb_encoder import read_training_pairs
from lit_encoders.evaluation.statistics import Interval
from lit_encoders.evaluation.suites import Measured, Suite, check_package, run_lm_eval, run_mteb, to_device
from lit_encoders.evaluation.tables import markdown, show_value
from lit_encoders.modules.lit_encoder import LitEncoder
from lit_encoders.modules.open_module import open_module

_DEFAULT_LENGTH = 512


def benchmark_verb(
    model: str,
    suite: Suite,
    tasks: list[str],
    output: Path | None = None,
    fine_tune_on: str | None = None,
    shots: int = 2,
    limit: int | None = None,
    causal: bool | None = None,
    pooling: Pooling = "mean",
    sequence_length: int | None = None,
    epochs: int = 1,
    batch: int = 64,
    learning_rate: float = 5e-5,
    seed: int = 0,
) -> str:
    """Run tasks of mteb (embeddings) or lm_eval (causal language models) on a model.

    Short names: with lm_eval belebele (its group of that name), global_piqa (its group global_piqa_cloze) and flores
    (its groups flores_ca, flores_es, flores_eu, flores_gl and flores_pt; chrF); with mteb beir (its benchmark BEIR).

    Args:
        model: folder, hub name or example:NAME.
        suite: mteb or lm_eval.
        tasks: names of the suite's tasks or groups, or belebele, global_piqa, flores, beir; with lm_eval also YAML
            files of tasks, with mteb folders in BEIR's form.
        output: JSON file to make; without it only the table is printed.
        fine_tune_on: of mteb, file with columns query and document to fine-tune on first, such as MS MARCO.
        shots: of lm_eval, solved items before each question.
        limit: of lm_eval, most items of each task.
        causal: of lm_eval, read a model from left to right although its tokenizer has a mask token, as one that was
            trained by CLM last.
        pooling: of mteb, a text's vector, mean or first.
        sequence_length: longest text in tokens; if not given 512 with mteb, or what the model reads, and with lm_eval
            all that it reads.
        epochs: of fine-tuning.
        batch: pairs of a step of fine-tuning; the documents of the others are the negatives.
        learning_rate: of fine-tuning, peak.
        seed: of fine-tuning.

    Raises:
        ValueError: a package is missing, the model or a task cannot be used, or a task's data cannot be reached; before
            anything is trained or measured.
    """
    if suite not in get_args(Suite):
        raise ValueError(f"suite must be one of {', '.join(get_args(Suite))}, got {suite!r}")
    if not tasks:
        raise ValueError("tasks must be at least one, got none")
    twice = next((name for place, name in enumerate(tasks) if name in tasks[:place]), None)
    if twice is not None:
        raise ValueError(f"tasks must differ, got {twice!r} twice")
    if output is not None and output.exists():
        raise ValueError(f"output must be a file that does not exist yet, got '{output}'")
    if shots < 0:
        raise ValueError(f"shots must be at least 0, got {shots}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    other: dict[str, Any] = {"limit": limit, "causal": causal} if suite == "mteb" else {"fine_tune_on": fine_tune_on}
    for key, value in other.items():
        if value is not None:
            raise ValueError(f"{key} must not be given with suite {suite}, got {value}")
    length = _DEFAULT_LENGTH if sequence_length is None else sequence_length
    try:
        settings = FineTuning(epochs, batch, learning_rate, sequence_length=length, pooling=pooling)
    except ValueError as error:
        raise ValueError(str(error).removeprefix("fine_tuning.")) from None
    check_package(suite)
    pairs = None if fine_tune_on is None else read_training_pairs(fine_tune_on)
    module = _open(model, causal)
    if suite == "mteb":
        if sequence_length is None and module.max_positions is not None:
            settings = replace(settings, sequence_length=min(length, module.max_positions))
        measured, raw = run_mteb(model, module, tasks, settings, pairs, seed)
        protocol: dict[str, Any] = {"pooling": pooling, "sequence_length": settings.sequence_length}
        if fine_tune_on is not None:
            protocol |= {"fine_tune_on": fine_tune_on, "seed": seed, **asdict(settings)}
    else:
        measured, raw = run_lm_eval(module, tasks, shots, limit, sequence_length)
        protocol = {"shots": shots, "limit": limit, "sequence_length": sequence_length}
    text = tables(measured)
    if output is None:
        return text
    _write(output, {"model": model, "suite": suite, "tasks": tasks, "protocol": protocol}, suite, measured, raw)
    return f"{text}\n\nWritten: {output}"


def tables(measured: Sequence[Measured]) -> str:
    """A table for each name that was asked for: its tasks, and their mean where they are several."""
    sections = []
    for name in dict.fromkeys(found.name for found in measured):
        rows = [found for found in measured if found.name == name]
        metrics = list(dict.fromkeys(metric for found in rows for metric in found.metrics))
        cells = [[row.task, *(_show(row.metrics.get(metric)) for metric in metrics), _count(row.items)] for row in rows]
        if len(rows) > 1:
            means = [[row.metrics[metric].mean for row in rows if metric in row.metrics] for metric in metrics]
            cells.append(["mean", *(f"{math.fsum(values) / len(values):.3f}" for values in means), ""])
        sections.append(f"{name}\n\n{markdown(['task', *metrics, 'items'], cells)}")
    return "\n\n".join(sections)


def _show(found: Interval | None) -> str:
    if found is None:
        return "-"
    return show_value(found) if found.num_values > 1 else f"{found.mean:.3f}"


def _count(items: int | None) -> str:
    return "-" if items is None else f"{items:,}"


def _open(model: str, causal: bool | None) -> LitEncoder:
    """The model on its device; refuses one without a tokenizer."""
    module = open_module(model, on_gpu=True)
    if causal:
        module.objective = "clm"
    return to_device(module)


def _write(
    output: Path, head: Mapping[str, Any], suite: str, measured: Sequence[Measured], raw: Mapping[str, Any]
) -> None:
    rows = [
        {
            "name": found.name,
            "task": found.task,
            "items": found.items,
            "metrics": {
                name: {"value": value.mean, "half_width": value.half_width if value.num_values > 1 else None}
                for name, value in found.metrics.items()
            },
        }
        for found in measured
    ]
    versions = {name: version(name) for name in ("lit_encoders", "torch", "transformers", suite)}
    whole = {**head, "versions": versions, "measured": rows, "results": raw}
    output.parent.mkdir(parents=True, exist_ok=True)
    beside = output.with_name(f".{output.name}")
    beside.write_text(json.dumps(_plain(whole), indent=2) + "\n", encoding="utf-8")
    os.replace(beside, output)


def _plain(value: Any) -> Any:
    """A result in plain types: no number is NaN, which JSON does not have, and what is no number is text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    number = value.item() if hasattr(value, "item") else value
    if isinstance(number, float):
        return number if math.isfinite(number) else None
    return number if isinstance(number, (bool, int)) else str(number)
