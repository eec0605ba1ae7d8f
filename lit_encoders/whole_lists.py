"""A list in a later file or flag replaces the earlier one whole.

The parser fills what an item leaves out from the item that stood at its place before, where both lists are of one
length: of two streams in another order, one would inherit the other's teacher. So an earlier list is emptied first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

_CONFIG = ("--config", "-c")


def replace_lists(arguments: Sequence[str], base: Path) -> list[str]:
    """Put a flag that empties a list before each file or flag that sets the same list anew.

    Args:
        arguments: of the command line; names of shipped files are paths already.
        base: the file that is read before all.
    """
    known = {_plain(key) for key in _lists(_read(base))}
    replaced: list[str] = []
    for place, argument in enumerate(arguments):
        before = arguments[place - 1] if place else ""
        flag, equals, value = argument.partition("=")
        if not equals and before.startswith("-") and "=" not in before:
            flag, value = before, argument
        if flag in _CONFIG:
            keys = list(_lists(_read(Path(value)))) if value else []
        else:
            keys = [flag.removeprefix("--")] if _of_mappings(_parsed(value)) and flag.startswith("--") else []
        emptied = [f"--{key}=[]" for key in keys if _plain(key) in known]
        # Before the flag, which may stand apart from its value.
        at = len(replaced) - (0 if equals else 1)
        replaced[at:at] = emptied
        replaced.append(argument)
        known |= {_plain(key) for key in keys}
    return replaced


def _plain(key: str) -> str:
    """A key as it is typed as a flag, which may leave out ``init_args``.

    >>> _plain("model.init_args.streams")
    'model.streams'
    """
    return ".".join(part for part in key.split(".") if part != "init_args")


def _lists(settings: Any, key: str = "") -> Iterator[str]:
    """Yield the keys of lists of mappings; those with a plus add to a list, and replace nothing."""
    if not isinstance(settings, Mapping):
        return
    for name, value in settings.items():
        below = f"{key}.{name}" if key else str(name)
        if _of_mappings(value) and not below.endswith("+"):
            yield below
        else:
            yield from _lists(value, below)


def _of_mappings(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, Mapping) for item in value)


def _parsed(text: str) -> Any:
    if not text.lstrip().startswith("["):
        return None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return None


def _read(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None  # The parser says what is wrong with it.
