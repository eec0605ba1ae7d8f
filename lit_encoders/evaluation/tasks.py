"""Kinds of tasks by their names in a file, and a task out of its settings there."""

from __future__ import annotations

from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any

from lit_encoders.evaluation.classification import Classification as Classification
from lit_encoders.evaluation.finetuning import FineTuning
from lit_encoders.evaluation.perplexity import Perplexity as Perplexity
from lit_encoders.evaluation.retrieval import Retrieval as Retrieval
from lit_encoders.evaluation.tagging_task import Tagging as Tagging
from lit_encoders.evaluation.task_base import Task as Task
from lit_encoders.evaluation.task_base import spread as spread

KINDS: dict[str, type[Task]] = {
    "perplexity": Perplexity,
    "classification": Classification,
    "tagging": Tagging,
    "retrieval": Retrieval,
}
# What a file cannot change of a preset: it brings its own items.
_OF_PRESETS = ("name", "read", "train", "test", "text", "label", "tokens", "tags", "query", "document", "group")


def make_task(name: str, settings: Any) -> Task:
    """Make a task out of its settings in a file.

    Args:
        name: of the task.
        settings: mapping with its ``kind`` and the attributes of that kind.

    Raises:
        ValueError: a setting is unknown, missing, or of another type.
    """
    kind_name = settings.get("kind") if isinstance(settings, dict) else settings
    if not isinstance(settings, dict) or not isinstance(kind_name, str) or kind_name not in KINDS:
        raise ValueError(f"tasks.{name}.kind must be one of {', '.join(KINDS)}, got {kind_name!r}")
    kind = KINDS[kind_name]
    allowed = [item.name for item in fields(kind) if item.name not in ("name", "read")]
    given = {str(key): value for key, value in settings.items() if key != "kind"}
    for key in given:
        if key not in allowed:
            near = get_close_matches(key, allowed, n=1)
            raise ValueError(f"tasks.{name}.{key} is no setting of {kind_name}" + (f"; {near[0]}?" if near else ""))
    task = kind(name=name, **_checked(name, kind, given, FineTuning()))
    for key in task.files:
        if not getattr(task, key):
            raise ValueError(f"tasks.{name}.{key} must name a file or dataset, got {given.get(key)!r}")
    return task


def override(task: Task, name: str, settings: dict[str, Any]) -> Task:
    """A task under another name, with some settings changed, as a file changes those of a preset.

    Raises:
        ValueError: a setting is unknown or of another type.
    """
    given = {str(key): value for key, value in settings.items()}
    allowed = [item.name for item in fields(task) if item.name not in _OF_PRESETS]
    for key in given:
        if key not in allowed:
            raise ValueError(f"tasks.{name}.{key} must be one of {', '.join(allowed)} beside a preset, got {key!r}")
    start = getattr(task, "fine_tuning", FineTuning())
    return replace(task, name=name, **_checked(name, type(task), given, start))


def _checked(name: str, kind: Any, given: dict[str, Any], start: FineTuning) -> dict[str, Any]:
    """The settings given, of the types that they have to be."""
    _check_types(name, kind, given)
    if "fine_tuning" not in given:
        return given
    return {**given, "fine_tuning": _fine_tuning(f"{name}.fine_tuning", given["fine_tuning"], start)}


def _fine_tuning(name: str, given: Any, start: FineTuning) -> FineTuning:
    allowed = [item.name for item in fields(FineTuning)]
    if not isinstance(given, dict):
        raise ValueError(f"tasks.{name} must have settings of {', '.join(allowed)}, got {given!r}")
    for key in given:
        if key not in allowed:
            near = get_close_matches(str(key), allowed, n=1)
            raise ValueError(f"tasks.{name}.{key} is no setting" + (f"; {near[0]}?" if near else ""))
    _check_types(name, FineTuning, given)
    try:
        return replace(start, **given)
    except ValueError as error:
        raise ValueError(str(error).replace("fine_tuning", f"tasks.{name}", 1)) from None


def _check_types(name: str, kind: Any, given: dict[str, Any]) -> None:
    """Refuse a number where there has to be text, and the other way round; annotations are text here."""
    for item in fields(kind):
        if item.name not in given or item.name in ("fine_tuning", "read"):
            continue
        value, kind_name = given[item.name], str(item.type)
        types: tuple[type, ...] = (str,)
        if kind_name.startswith("int"):
            types = (int,)
        elif kind_name.startswith("float"):
            types = (int, float)
        elif kind_name.startswith("bool"):
            types = (bool,)
        wrong = not isinstance(value, types) or (isinstance(value, bool) and bool not in types)
        if wrong and not (value is None and "None" in kind_name):
            raise ValueError(f"tasks.{name}.{item.name} must be {types[-1].__name__}, got {value!r}")
    for key in ("limit", "test_limit", "documents"):
        if given.get(key) is not None and given[key] < 1:
            raise ValueError(f"tasks.{name}.{key} must be at least 1, got {given[key]}")
