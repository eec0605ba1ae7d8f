"""Configurations side by side: flat keys that mean the same thing in every run, and which of them differ."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# The run's own folder differs always, and says nothing.
NAMES_THE_RUN = ("trainer.default_root_dir",)
# What people look for first; the trainer's many keys come last.
SECTIONS = ("model", "data", "schedule", "validate_every", "seed_everything")


def flatten(value: Any, key: str = "") -> dict[str, str]:
    """Flatten a configuration to keys with dots.

    A class and its arguments become one key and those below it; items of a list are called by their class or name, not
    by their place, so that one more callback moves no other.

    Args:
        value: mappings, lists and plain values, as YAML has them.
        key: of the value itself.

    >>> flatten({"model": {"class_path": "a.Net", "init_args": {"size": 3}}})
    {'model': 'a.Net', 'model.size': '3'}
    >>> flatten({"callbacks": [{"class_path": "a.Stop"}], "betas": [0.9, 0.98], "val": None})
    {'callbacks.Stop': 'a.Stop', 'betas': '[0.9, 0.98]', 'val': 'null'}
    """
    if isinstance(value, Mapping) and value:
        named = {key: _show(value["class_path"])} if key and "class_path" in value else {}
        rest = {name: inner for name, inner in value.items() if name not in ("class_path", "init_args") or not named}
        arguments = value.get("init_args") if named else None
        for name, inner in {**rest, **(arguments if isinstance(arguments, Mapping) else {})}.items():
            named |= flatten(inner, f"{key}.{name}" if key else str(name))
        return named
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        flat: dict[str, str] = {}
        seen: dict[str, int] = {}
        for place, item in enumerate(value):
            name = _item_name(item, place)
            seen[name] = seen.get(name, 0) + 1
            flat |= flatten(item, f"{key}.{name}" + (f"[{seen[name]}]" if seen[name] > 1 else ""))
        return flat
    return {key: _show(value)}


def _item_name(item: Any, place: int) -> str:
    if isinstance(item, Mapping):
        if "class_path" in item:
            return str(item["class_path"]).rpartition(".")[2]
        if "name" in item:
            return str(item["name"])
    return str(place)


def _show(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def compare(settings: Sequence[Mapping[str, str]]) -> tuple[list[str], list[str]]:
    """Keys that differ between runs, a key that one run lacks among them, and keys that are equal.

    Args:
        settings: flat ones, one for each run.

    >>> compare([{"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}])
    (['b', 'c'], ['a'])
    """
    keys = in_order({key for flat in settings for key in flat}, settings)
    apart = [key for key in keys if key not in NAMES_THE_RUN and len({flat.get(key) for flat in settings}) > 1]
    return apart, [key for key in keys if key not in apart and key not in NAMES_THE_RUN]


def in_order(keys: Iterable[str], settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Keys in the order of the configurations, `SECTIONS` before all else."""
    places = {key: place for place, key in enumerate(dict.fromkeys(key for flat in settings for key in flat))}

    def rank(key: str) -> tuple[int, int]:
        section = key.partition(".")[0]
        return SECTIONS.index(section) if section in SECTIONS else len(SECTIONS), places[key]

    return sorted(keys, key=rank)
