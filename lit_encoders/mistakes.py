"""Users' mistakes become one line: the key, the rule and the value got."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_KEY = re.compile(r'Parser key "([^"]+)":\s*(.*)')
_PROBLEM = re.compile(r"Problem with given class_path '([^']+)':\s*(.*)")
_OPTION = re.compile(r"Option '([^']+)' is not accepted")
_REGISTERED = re.compile(r"Not of type \w+: (must .*)")
_EXPECTED = re.compile(r"Expected an? (.+?)(?:\. Got value: (.*))?$")
# Lightning's words for two callbacks whose states could not be told apart.
_TWICE = re.compile(r"Found more than one stateful callback of type `(\w+)`")
_STRUCTURE = re.compile(r"(Does not validate against|Subtypes:|Errors:|Given value type:|$)")


class UsageError(Exception):
    """The user's command or configuration cannot be run; the message is one line."""


def one_line(message: str) -> str:
    """Put an error message into one line that names key, rule and value.

    The parser's messages nest: each level says which key failed and indents what its value had to say. The keys on the
    way to the first leaf are joined, and the leaves are the rules. Messages of our own, which already name all three,
    pass as they are.

    >>> one_line('Parser key "model":\\n  Parser key "eps":\\n    Expected a <class \\'float\\'>. Got value: x')
    "model.eps must be float, got 'x'"
    >>> one_line('Parser key "tokens":\\n  Not of type Tokens: must be a number, got \\'x\\'')
    "tokens must be a number, got 'x'"
    >>> one_line('Parser key "layers":\\n  Expected a <class \\'str\\'>. Got value: 568')
    'layers must be text in quotes (YAML reads an unquoted 9:28 as the number 568), got 568'
    >>> one_line("the following arguments are required: fit.data.train, fit.model")
    'the following arguments are required: data.train, model'
    >>> one_line("data.slots must be at least 1,\\n  got 0")
    'data.slots must be at least 1, got 0'
    """
    if message.startswith("the following arguments are required"):
        # The parser names them below the verb, where nobody types them.
        message = re.sub(r"\b(?:fit|validate|test|predict)\.", "", message)
    keys: list[str] = []
    owner = ""
    rules: list[str] = []
    value: str | None = None
    for line in message.splitlines():
        text = line.strip().removeprefix("- ")
        if found := _KEY.match(text):
            if not rules:
                keys.append(found[1])
            text = found[2]
        if found := _PROBLEM.match(text):
            owner = owner or found[1].rpartition(".")[2]
            text = found[2]
        if found := _OPTION.search(text):
            return f"{'.'.join([*keys, found[1]])} is no option of {owner or 'this command'}"
        if found := _REGISTERED.match(text):
            return f"{'.'.join(keys)} {found[1]}"
        if text.startswith("Given value:"):
            value = value if value is not None else text.removeprefix("Given value:").strip()
            if rules:
                break  # What follows are the other types that a level above would have taken.
        elif found := _EXPECTED.match(text):
            rule = _readable(found[1])
            # A list may also stand in a file of its own, which is not what was meant.
            if rule != "None" and rule not in rules and not rule.startswith("path but "):
                rules.append(rule)
            value = found[2] if value is None else value
        elif not _STRUCTURE.match(text):
            rest = message[message.index(text) :] if not keys else text
            own = re.split(r"\n\s*- (?:Expected|Not a valid) |\n\s*Given value", rest)[0]
            own = re.sub(r"\s+", " ", own)
            return own if " must " in own or not keys else f"{'.'.join(keys)}: {own}"
    if not rules:
        return re.sub(r"\s+", " ", message.strip())
    if "str" in rules and value is not None and re.fullmatch(r"-?\d+", value):
        return f"{'.'.join(keys)} must be text in quotes (YAML reads an unquoted 9:28 as the number 568), got {value}"
    return f"{'.'.join(keys)} must be {' or '.join(rules)}, got {value!r}"


def _readable(rule: str) -> str:
    """Say a type as a user would.

    >>> _readable("typing.Literal['mlm', 'clm']"), _readable("<class 'NoneType'>")
    ("one of 'mlm', 'clm'", 'None')
    """
    if found := re.match(r"(?:typing\.)?Literal\[(.*)\]", rule):
        return f"one of {found[1]}"
    if found := re.match(r"<class '(?:\w+\.)*(\w+)'>", rule):
        return "None" if found[1] == "NoneType" else found[1]
    return rule


def _lightning() -> tuple[type[Exception], ...]:
    """Lightning's own error for settings, where Lightning is in use at all."""
    module = sys.modules.get("lightning.fabric.utilities.exceptions")
    return () if module is None else (module.MisconfigurationException,)


@contextmanager
def in_one_line(started: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Turn what goes wrong before training into a `UsageError`; let everything after pass as it is.

    Args:
        started: whether training has begun, so that an error is no longer the user's.
    """
    from jsonargparse import ArgumentError

    try:
        yield
    except Exception as error:
        own = (ValueError, TypeError, OSError, NotImplementedError, ImportError, ArgumentError, *_lightning())
        if (twice := _TWICE.match(str(error))) and isinstance(error, RuntimeError):
            raise UsageError(f"trainer.callbacks must have no two alike, got {twice[1]} twice") from error
        if started() or not isinstance(error, own):
            raise
        raise UsageError(one_line(str(error) or type(error).__name__)) from error
