"""Terms of an OBO ontology: their definitions are text, their synonyms queries, their branches classes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_STANZA = re.compile(r"^\[Term\]$(.*?)(?=^\[|\Z)", re.MULTILINE | re.DOTALL)
_QUOTED = r'"((?:[^"\\]|\\.)*)"'
_DEFINITION = re.compile(rf"^def: {_QUOTED}", re.MULTILINE)
_SYNONYM = re.compile(rf"^synonym: {_QUOTED} EXACT\b", re.MULTILINE)
_LINE = re.compile(r"^(id|name|is_a): (.*?)(?: !.*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Term:
    """A term that is in use.

    Attributes:
        id: such as HP:0000118.
        name: of the term; "" where it has none.
        definition: one or a few sentences; "" where it has none.
        synonyms: other names that mean exactly the same.
        parents: ids of the terms above it.
    """

    id: str
    name: str
    definition: str
    synonyms: tuple[str, ...]
    parents: tuple[str, ...]


def read_obo_terms(path: Path) -> Iterator[Term]:
    """Yield the terms of an OBO ontology that are in use, in file order."""
    for stanza in _STANZA.finditer(path.read_text(encoding="utf-8")):
        if "\nis_obsolete: true" in stanza[1]:
            continue
        lines: dict[str, list[str]] = {"id": [], "name": [], "is_a": []}
        for key, value in _LINE.findall(stanza[1]):
            lines[key].append(value)
        definition = _DEFINITION.search(stanza[1])
        yield Term(
            lines["id"][0],
            _unescaped("".join(lines["name"][:1])),
            _unescaped(definition[1]) if definition else "",
            tuple(_unescaped(synonym) for synonym in _SYNONYM.findall(stanza[1])),
            # A modifier in braces may follow.
            tuple(parent.partition(" ")[0] for parent in lines["is_a"]),
        )


def branches(terms: Iterable[Term], root: str) -> dict[str, frozenset[str]]:
    """The children of ``root`` that each term stands below, or is; by the term's id.

    >>> terms = [Term(i, i, "", (), p) for i, p in {"r": (), "a": ("r",), "b": ("r",), "ab": ("a", "b")}.items()]
    >>> [sorted(found) for found in branches(terms, "r").values()]
    [[], ['a'], ['b'], ['a', 'b']]
    """
    parents = {term.id: term.parents for term in terms}
    found: dict[str, frozenset[str]] = {}

    def above(name: str) -> frozenset[str]:
        if name not in found:
            over = parents.get(name, ())
            found[name] = frozenset([name] if root in over else []).union(*map(above, over))
        return found[name]

    return {name: above(name) for name in parents}


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)
