"""The shipped configurations: found by name, listed, and printed whole."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from textwrap import dedent, indent

from lit_encoders.mistakes import UsageError

# Where each kind lies, and what the list says of its use.
KINDS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "recipes": (("quickstart.yaml", "recipes/*.yaml"), "--config NAME"),
    "overlays": (("smoke.yaml",), "a second --config NAME"),
    "models": (("models/*.yaml",), "--model NAME"),
}
_CONFIG = (("recipes", "overlays"), "config must be a file that exists or one of")
_MODEL = (("models",), "model must be a class such as lit_encoders.LitMLM, a file that exists or one of")
# Flags that take the name of a shipped file.
_NAMED = {"--config": _CONFIG, "-c": _CONFIG, "--model": _MODEL}
_NAME = re.compile(r"[\w-]+")
_KEY = re.compile(r"([\w./:-]+\+?):(?: +(.*))?$")


def config_folder() -> Path:
    """Where the shipped configurations lie."""
    return Path(str(files("lit_encoders.cli_configs")))


def shipped(*kinds: str) -> dict[str, Path]:
    """Find the shipped configurations of some kinds, or of all.

    >>> sorted(shipped("overlays"))
    ['smoke']
    """
    patterns = [pattern for kind in kinds or KINDS for pattern in KINDS[kind][0]]
    return {path.stem: path for pattern in patterns for path in sorted(config_folder().glob(pattern))}


def find_config(name: str, *kinds: str, rule: str) -> Path:
    """Find a shipped configuration.

    Args:
        name: without folder and ending.
        kinds: to look among; none for all.
        rule: what the message says of the names that there are, such as "config must be one of".

    Raises:
        UsageError: there is none; the message has the nearest name.
    """
    known = shipped(*kinds)
    if name in known:
        return known[name]
    near = get_close_matches(name, known, n=1)
    raise UsageError(f"{rule} {', '.join(known)}, got {name!r}" + (f"; {near[0]}?" if near else ""))


def replace_names(arguments: Sequence[str]) -> list[str]:
    """Put the shipped files in the place of their names after ``--config`` and ``--model``; a file of the user's wins.

    Raises:
        UsageError: no such name, or an overlay with nothing before it to be laid over.

    >>> [Path(argument).name for argument in replace_names(["--config", "clm_detour", "--model=mine.yaml"])]
    ['--config', 'clm_detour.yaml', '--model=mine.yaml']
    """
    replaced: list[str] = []
    before, num_configs = "", 0
    for argument in arguments:
        flag, equals, value = (before, "", argument) if before in _NAMED else argument.partition("=")
        before = argument
        if flag in _NAMED and _NAME.fullmatch(value) and not Path(value).is_file():
            kinds, rule = _NAMED[flag]
            path = find_config(value, *kinds, rule=rule)
            if num_configs == 0 and value in shipped("overlays"):
                raise UsageError(f"config must name a recipe before what is laid over it, got {value!r} first")
            argument = f"{flag}={path}" if equals else str(path)
        num_configs += flag in ("--config", "-c") and bool(value)
        replaced.append(argument)
    return replaced


@dataclass(frozen=True)
class Entry:
    """A key's value in a configuration file, with what is said about it.

    Attributes:
        value: a mapping, or the value's own lines.
        comments: the lines of comment above the key.
    """

    value: dict[str, Entry] | list[str]
    comments: tuple[str, ...] = ()


def read_entries(lines: Sequence[str]) -> dict[str, Entry]:
    """Read the keys of a mapping in YAML's block style; every other value stays the text that it is.

    Args:
        lines: of the mapping, its keys at the left margin.

    >>> read_entries(["# why", "a:", "  b: 1 # so", "c+:", "  - d"])["a"]
    Entry(value={'b': Entry(value=['1 # so'], comments=())}, comments=('# why',))
    """
    entries: dict[str, Entry] = {}
    comments: list[str] = []
    place = 0
    while place < len(lines):
        line, place = lines[place], place + 1
        if line.startswith("#"):
            comments.append(line)
        elif found := _KEY.match(line):
            stop = place
            while stop < len(lines) and (not lines[stop] or lines[stop].startswith(" ")):
                stop += 1
            below, place = dedent("\n".join(lines[place:stop])).rstrip().splitlines(), stop
            nested = not found[2] and any(_KEY.match(text) for text in below)
            value = read_entries(below) if nested else [found[2] or "", *below]
            entries[found[1]] = Entry(value, tuple(comments))
            comments = []
    return entries


def lay_over(below: Mapping[str, Entry], above: Mapping[str, Entry]) -> dict[str, Entry]:
    """Merge two configurations as the command line does: the upper wins, ``key+`` appends to a list.

    >>> below, above = (read_entries(text.splitlines()) for text in ("a:\\n  - 1\\nb: 2", "a+:\\n  - 3"))
    >>> print(render(lay_over(below, above)))
    a:
      - 1
      - 3
    b: 2
    """
    merged: dict[str, Entry] = {}
    for name, entry in above.items():
        key = name.removesuffix("+")
        under = below.get(key)
        if under and isinstance(entry.value, dict) and isinstance(under.value, dict):
            entry = replace(entry, value=lay_over(under.value, entry.value))
        elif under and key != name:
            assert isinstance(entry.value, list)
            assert isinstance(under.value, list)
            entry = Entry(["", *under.value[1:], *entry.comments, *entry.value[1:]], under.comments)
        merged[key] = entry
    return {**merged, **{key: entry for key, entry in below.items() if key not in merged}}


def render(entries: Mapping[str, Entry]) -> str:
    """Write entries as YAML."""
    lines: list[str] = []
    for key, entry in entries.items():
        lines += entry.comments
        if isinstance(entry.value, dict):
            lines += [f"{key}:", indent(render(entry.value), "  ")]
        else:
            first, *rest = entry.value
            lines += [f"{key}: {first}".rstrip(), *(f"  {line}" for line in rest)]
    return "\n".join(lines)


def read_config(path: Path) -> tuple[list[str], dict[str, Entry]]:
    """Read a shipped file: its opening comment, and its entries."""
    lines = path.read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return lines[:start], read_entries(lines[start:])


def print_config(name: str) -> str:
    """Give a shipped configuration as one text: a recipe with ``base.yaml`` beneath it, anything else as it is.

    Raises:
        UsageError: no such name.
    """
    path = find_config(name, rule="NAME must be one of")
    opening, entries = read_config(path)
    if name in shipped("recipes"):
        entries = lay_over(read_config(config_folder() / "base.yaml")[1], entries)
    return "\n".join([*opening, render(entries)])


def list_configs() -> str:
    """Give every shipped configuration with the first line of its file."""
    width = max(map(len, shipped()))

    def section(kind: str) -> Iterable[str]:
        yield f"{kind} ({KINDS[kind][1]})"
        for name, path in shipped(kind).items():
            yield f"  {name:<{width}}  {read_config(path)[0][0].removeprefix('# ')}"

    return "\n\n".join("\n".join(section(kind)) for kind in KINDS)


def configs_verb(name: list[str] | None = None) -> str:
    """List the shipped configurations, or print one that can be changed and run from anywhere.

    Args:
        name: of one; none lists them.
    """
    if not name:
        return list_configs()
    if len(name) > 1:
        raise UsageError(f"NAME must be one name, got {' '.join(name)}")
    return print_config(name[0])
