"""Match the names of the same weights in two places, where one or the other stands deeper in a wrapper."""

from __future__ import annotations

from collections.abc import Collection


def match_names(wanted: Collection[str], stored: Collection[str]) -> dict[str, str]:
    """Find each wanted name among the stored ones, apart from a prefix that one side has on all of them.

    ``backbone.model.bert.encoder.x`` finds ``bert.encoder.x`` or ``encoder.x``, and the other way round. Weights are
    matched by name, never by order or value: what has no counterpart is left out of the result.

    Args:
        wanted: names as one side has them.
        stored: names as the other side has them.

    Returns:
        Wanted name -> stored name, for those that match.

    Raises:
        ValueError: two prefixes fit equally well, such as those of a teacher and a student.

    >>> match_names(["model.bert.a", "model.bert.b", "model.head"], ["a", "b"])
    {'model.bert.a': 'a', 'model.bert.b': 'b'}
    """
    ours, theirs = set(wanted), set(stored)
    best: dict[str, dict[str, str]] = {"": {name: name for name in wanted if name in theirs}}
    for prefix in _prefixes(ours):
        best[prefix] = {name: n for name in wanted if (n := name.removeprefix(prefix)) != name and n in theirs}
    for prefix in _prefixes(theirs):
        best[f"+{prefix}"] = {name: prefix + name for name in wanted if prefix + name in theirs}
    ranked = sorted(best, key=lambda prefix: len(best[prefix]), reverse=True)
    first = best[ranked[0]]
    if len(ranked) > 1 and first and len(best[ranked[1]]) == len(first):
        raise ValueError(
            f"weights must match by name in one way, got {len(first)} matches under both "
            f"{ranked[0].lstrip('+')!r} and {ranked[1].lstrip('+')!r}"
        )
    return first


def _prefixes(names: Collection[str]) -> list[str]:
    """Every way to cut the names off at a dot, "a.b.c" giving "a." and "a.b."."""
    found: dict[str, None] = {}
    for name in sorted(names):
        place = name.find(".")
        while place >= 0:
            found[name[: place + 1]] = None
            place = name.find(".", place + 1)
    return list(found)
