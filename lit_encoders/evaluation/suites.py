"""Suites of other people's benchmarks, run by their own packages: mteb and lm_eval, imported where they are used.

Written for mteb 2.26 and lm_eval 0.4.13.
"""

from __future__ import annotations

import logging
import math
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from lit_encoders.evaluation.finetuning import FineTuning
from lit_encoders.evaluation.lm_eval_model import lm_eval_model
from lit_encoders.evaluation.mteb_encoder import MtebEncoder, fine_tune_on_pairs, folder_task
from lit_encoders.evaluation.reach import hub_or_cache, reaching
from lit_encoders.evaluation.statistics import Interval, t_interval
from lit_encoders.modules.lit_encoder import LitEncoder

Suite = Literal["mteb", "lm_eval"]
# Of lm_eval 0.4.13. Of Global PIQA the form for models without instructions; of FLORES-200, which has no group over
# all languages there, the groups around one language each.
SHORT_NAMES = {
    "belebele": ("belebele",),
    "global_piqa": ("global_piqa_cloze",),
    "flores": ("flores_ca", "flores_es", "flores_eu", "flores_gl", "flores_pt"),
}
# Besides its main score, what is shown of a task of mteb that has it.
_MTEB_METRICS = ("ndcg_at_10", "mrr_at_10", "recall_at_100")


@dataclass(frozen=True)
class Measured:
    """What a model got on one task.

    Attributes:
        name: that was asked for, of which the task is a part.
        task: of the suite.
        metrics: name -> value; an interval (95 %) over items where the value is their mean.
        items: tested; None where the suite does not say.
    """

    name: str
    task: str
    metrics: dict[str, Interval]
    items: int | None = None


def check_package(suite: str) -> None:
    """Refuse a suite whose package is not installed.

    Raises:
        ValueError: with the command that installs it.
    """
    if find_spec(suite) is None:
        raise ValueError(f"suite {suite} needs {suite}: pip install -c constraints.txt -e '.[benchmarks]'")


def run_lm_eval(
    module: LitEncoder, names: Sequence[str], shots: int, limit: int | None, sequence_length: int | None = None
) -> tuple[list[Measured], dict[str, Any]]:
    """Run tasks of lm_eval.

    Args:
        module: of a causal model.
        names: see `benchmark_verb`.
        shots: solved items before each question; a task that says 0 itself keeps it.
        limit: most items of each task.
        sequence_length: longest text in tokens; None is all that the model reads.

    Returns:
        What was measured, task by task, and lm_eval's own results.

    Raises:
        ValueError: the model is not causal, a task is unknown, or its data cannot be reached.
    """
    lm = lm_eval_model(module, sequence_length=sequence_length)
    import lm_eval
    from lm_eval.tasks import TaskManager

    local = [name for name in names if _is_file(name)]
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    # The index of its 14,000 tasks takes 20 s; a file needs none.
    manager = TaskManager(include_defaults=len(local) < len(names))
    wanted = [(name, part) for name in names for part in ((name,) if name in local else SHORT_NAMES.get(name, (name,)))]
    for name, part in wanted:
        if name not in local and part not in manager.task_index:
            near = get_close_matches(name, [*SHORT_NAMES, *manager.all_tasks], n=1)
            hint = f"; {near[0]}?" if near else ""
            raise ValueError(f"tasks must be names of lm_eval's or YAML files, got {name!r}{hint}")
    loaded: list[Any] = []
    owners: dict[str, str] = {}
    with hub_or_cache(needed=len(local) < len(names)):
        for name, part in wanted:
            with reaching(name if name == part else f"{name} ({part})"):
                found = manager.load([part])
            groups = found.get("groups") or {}
            loaded += [groups[part]] if part in groups else list(found["tasks"].values())
            for task in found["tasks"]:
                if task in owners:
                    raise ValueError(f"tasks must not overlap, got {task!r} in both {owners[task]!r} and {name!r}")
                owners[task] = name
        # What a task prints is no part of the answer.
        with redirect_stdout(sys.stderr):
            results: dict[str, Any] = lm_eval.simple_evaluate(
                lm,
                tasks=loaded,
                num_fewshot=shots,
                limit=limit,
                # Resampling a corpus metric such as chrF takes minutes for each task.
                bootstrap_iters=0,
                task_manager=manager,
            )
    measured = []
    for task, name in owners.items():
        values = {
            key.removesuffix(",none"): value
            for key, value in results["results"][task].items()
            if "," in key and "_stderr," not in key and isinstance(value, (int, float))
        }
        samples = results["samples"][task]
        metrics = {key: over_items(value, [s.get(key) for s in samples]) for key, value in values.items()}
        measured.append(Measured(name, task, metrics, results["n-samples"][task]["effective"]))
    raw: dict[str, Any] = {
        key: results[key] for key in ("results", "versions", "n-shot", "n-samples") if key in results
    }
    return measured, raw


def run_mteb(
    model: str,
    module: LitEncoder,
    names: Sequence[str],
    settings: FineTuning,
    pairs: Sequence[tuple[str, str]] | None = None,
    seed: int = 0,
) -> tuple[list[Measured], dict[str, Any]]:
    """Run tasks of mteb.

    Args:
        model: name of the model.
        module: of the model, as it stands.
        names: see `benchmark_verb`.
        settings: of fine-tuning; of a model as it stands their pooling and sequence_length.
        pairs: queries and documents to fine-tune on first.
        seed: of fine-tuning.

    Returns:
        What was measured, task by task, and all of mteb's scores.

    Raises:
        ValueError: the model cannot be read, a task is unknown, or its data cannot be reached.
    """
    read: dict[str, Any] = {"sequence_length": settings.sequence_length, "pooling": settings.pooling}
    MtebEncoder(module, model, **read)
    import mteb

    wanted = [(name, task) for name in names for task in _mteb_tasks(name)]
    with hub_or_cache(needed=not all(Path(name).is_dir() for name in names)):
        # All data are there before hours are spent on the first task.
        for name, task in wanted:
            for part in task.metadata.tasks if task.is_aggregate else [task]:
                with reaching(name if name == part.metadata.name else f"{name} ({part.metadata.name})"):
                    part.load_data()
                part.unload_data()
        if pairs is not None:
            module = to_device(fine_tune_on_pairs(model, pairs, settings, seed))
        encoder = MtebEncoder(module, model, **read)
        measured, raw = [], {}
        for name, task in wanted:
            with redirect_stdout(sys.stderr):
                found = mteb.evaluate(encoder, task, cache=None, co2_tracker=False, show_progress_bar=False)
            result = found.task_results[0]
            metrics = {}
            for metric in dict.fromkeys((task.metadata.main_score, *_MTEB_METRICS)):
                if all(metric in scores for split in result.scores.values() for scores in split):
                    metrics[metric] = alone(result.get_score(getter=lambda scores, key=metric: scores[key]))
            measured.append(Measured(name, task.metadata.name, metrics))
            raw[task.metadata.name] = result.scores
            _say(f"{task.metadata.name}: {', '.join(f'{key} {value.mean:.4f}' for key, value in metrics.items())}")
    return measured, raw


def _mteb_tasks(name: str) -> list[Any]:
    """Tasks of mteb that a name or a folder stands for."""
    import mteb

    if Path(name).is_dir():
        return [folder_task(name)]
    if name == "beir":
        return list(mteb.get_benchmark("BEIR").tasks)
    try:
        return [mteb.get_task(name)]
    except KeyError as error:
        near = re.search(r"Did you mean: '(.+)'", str(error.args[0]))
        hint = f"; {near[1]}?" if near else ""
        raise ValueError(f"tasks must be beir, names of mteb's or folders in BEIR's form, got {name!r}{hint}") from None


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) and Path(name).is_file()


def alone(value: float) -> Interval:
    """A value of which nothing is known but itself."""
    return Interval(float(value), math.inf, 1)


def over_items(value: float, items: Sequence[Any]) -> Interval:
    """A value with its interval where it is the mean of what items got; a corpus metric such as chrF has none.

    >>> over_items(0.5, [0.0, 1.0, 1.0, 0.0]).num_values, over_items(31.5, [("a", "b"), ("c", "d")]).num_values
    (4, 1)
    """
    if len(items) > 1 and all(isinstance(item, (int, float)) for item in items):
        found = t_interval([float(item) for item in items])
        if math.isclose(found.mean, value, abs_tol=1e-9):
            return found
    return alone(value)


def to_device(module: LitEncoder) -> LitEncoder:
    """Load a module's weights, onto the GPU where there is one."""
    module.configure_model()
    return module.to("cuda" if torch.cuda.is_available() else "cpu")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
