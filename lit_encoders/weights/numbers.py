"""Lists of numbers as people type them: ``--alpha 0,.25,1``."""

from __future__ import annotations

from typing import TYPE_CHECKING


def parse_numbers(value: object) -> list[float]:
    """Read numbers with commas between them.

    Args:
        value: text such as "0,.25,1", a number, or a list of numbers.

    Raises:
        ValueError: something in it is no finite number.

    >>> parse_numbers("0,.25,1"), parse_numbers(0.5)
    ([0.0, 0.25, 1.0], [0.5])
    """
    items = value if isinstance(value, list | tuple) else str(value).strip("[] ").split(",")
    try:
        numbers = [float(str(item)) for item in items]
    except ValueError:
        numbers = [float("nan")]
    if not numbers or any(number - number != 0 for number in numbers):
        raise ValueError(f"must be numbers with commas between them, such as 0,.25,1, got {value!r}")
    return numbers


def _is_parsed(value: object, wanted: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, float) for item in value)


if TYPE_CHECKING:
    Numbers = list[float]
else:

    class Numbers(list):
        """Annotation of a list of numbers: a plain list of floats, given as `parse_numbers` reads it."""

    try:
        from jsonargparse.typing import register_type
    except ImportError:
        pass  # Without a command line nothing has to be parsed.
    else:
        register_type(Numbers, serializer=list, deserializer=parse_numbers, type_check=_is_parsed)
