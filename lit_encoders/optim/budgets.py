"""Budgets in tokens, as people write them: 10e9, 10_000_000_000, "10B"."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def parse_tokens(value: float | str) -> float:
    """Read a number of tokens.

    Args:
        value: a number, or text such as "10e9", "10_000_000_000", "10B", "100M" or "64K" (thousands, not 1,024).

    Raises:
        ValueError: not a number, or not a finite one.

    >>> [parse_tokens(text) for text in ("10e9", "10B", "2.5M", "64k", "1_000")]
    [10000000000.0, 10000000000.0, 2500000.0, 64000.0, 1000.0]
    """
    text = str(value).strip()
    unit = _UNITS.get(text[-1:].upper())
    try:
        number = float(text if unit is None else text[:-1]) * (unit or 1.0)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"must be a number of tokens such as 10e9 or 10B, got {value!r}")
    return number


def plain_tokens(value: float) -> float:
    """Give what a saved configuration holds: an integer where it is one.

    >>> plain_tokens(10e9)
    10000000000
    """
    return int(value) if float(value).is_integer() else float(value)


def _is_parsed(value: object, wanted: type) -> bool:
    return isinstance(value, float) and math.isfinite(value)


if TYPE_CHECKING:
    Tokens = float
else:

    class Tokens(float):
        """Annotation of a number of tokens: a plain float, which YAML and flags give as `parse_tokens` reads it."""

    try:
        from jsonargparse.typing import register_type
    except ImportError:
        pass  # Without a command line nothing has to be parsed.
    else:
        # Here, and not in our own command line: callbacks are also configured from other projects' LightningCLI.
        register_type(Tokens, serializer=plain_tokens, deserializer=parse_tokens, type_check=_is_parsed)
