"""Users' mistakes become one line: the key, the rule and the value got."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class UsageError(Exception):
    """The user's command or configuration cannot be run; the message is one line."""


def one_line(error: BaseException) -> str:
    """Put an error into one line.

    The parser's messages nest: each level says which key failed and indents what its value had to say. The innermost
    one is what the user has to mend; the keys on the way to it are put in front.

    >>> one_line(ValueError("first\\n  second"))
    'first second'
    """
    text = str(error).strip() or type(error).__name__
    return re.sub(r"\s+", " ", text)


@contextmanager
def in_one_line(started: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Turn what goes wrong before training into a `UsageError`; let everything after pass as it is.

    Args:
        started: whether training has begun, so that an error is no longer the user's.
    """
    from jsonargparse import ArgumentError

    try:
        yield
    except (ValueError, TypeError, OSError, NotImplementedError, ImportError, ArgumentError) as error:
        if started():
            raise
        raise UsageError(one_line(error)) from error
