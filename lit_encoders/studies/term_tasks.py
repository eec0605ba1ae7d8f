"""Two tasks of an ontology's terms, with terms held out: the branch of a definition, the definition of a synonym.

A held-out term's definition is in no pretraining text. Both tasks are read off the resting encoder by linear probes
that are fitted on other terms.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

from lit_encoders.data.examples import find_example
from lit_encoders.data.ontology import Term, branches, read_obo_terms
from lit_encoders.evaluation.embeddings import embed
from lit_encoders.evaluation.items import Collection, Query
from lit_encoders.evaluation.linear_probes import fit_classifier, fit_projection
from lit_encoders.evaluation.ranking import ranking_scores
from lit_encoders.modules.lit_encoder import LitEncoder
from lit_encoders.studies.results import write_json


@dataclass(frozen=True)
class TermItem:
    """What the tasks know of a term.

    Attributes:
        definition: text to classify, and to find.
        branch: its class; "" where it stands in several branches or in none.
        synonym: query for its definition; "" where it has none.
    """

    definition: str
    branch: str
    synonym: str


@dataclass(frozen=True)
class TermSplit:
    """Terms for pretraining, for fitting the probes, and for testing.

    Attributes:
        pretraining: definitions of all terms but the tested ones.
        fit: terms that probes are fitted on; their definitions are among the pretraining text, without their classes
            and synonyms.
        test: terms held out from everything else.
    """

    pretraining: list[str]
    fit: list[TermItem]
    test: list[TermItem]


def split_terms(terms: Sequence[Term], root: str, fit: int, test: int, seed: int = 0) -> TermSplit:
    """Split the terms that have a definition; one that defines a tested term too is in no other part.

    Args:
        terms: of an ontology.
        root: the term whose children are the classes.
        fit: number of terms to fit probes on.
        test: number of terms to test on.
        seed: of the split.

    Raises:
        ValueError: there are too few terms.
    """
    defined = [term for term in terms if term.definition]
    if len(defined) <= fit + test:
        raise ValueError(f"terms with a definition must be more than {fit + test}, got {len(defined)}")
    random.Random(seed).shuffle(defined)
    classes = branches(terms, root)

    def item(term: Term) -> TermItem:
        branch = next(iter(classes[term.id])) if len(classes[term.id]) == 1 else ""
        # A synonym that the definition begins with, or is, would be found without understanding.
        synonym = next((name for name in term.synonyms if name.lower() not in term.definition.lower()), "")
        return TermItem(term.definition, branch, synonym)

    held_out = {term.definition for term in defined[:test]}
    others = [term for term in defined[test:] if term.definition not in held_out]
    if len(others) <= fit:
        raise ValueError(f"terms with other definitions than the tested must be more than {fit}, got {len(others)}")
    return TermSplit(
        [term.definition for term in others],
        [item(term) for term in others[:fit]],
        [item(term) for term in defined[:test]],
    )


def write_split(split: TermSplit, text: Path, terms: Path) -> None:
    """Write the definitions to pretrain on, and the terms to fit and test on.

    Args:
        split: of the terms.
        text: file of documents to make.
        terms: file to make, see `read_split`.
    """
    write_documents(text, split.pretraining)
    write_json(terms, {name: [asdict(item) for item in getattr(split, name)] for name in ("fit", "test")})


def write_documents(path: Path, texts: Sequence[str]) -> None:
    """Write texts as JSON lines."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def read_split(terms: Path) -> TermSplit:
    """The terms to fit and test on, as `write_split` stored them; without the definitions to pretrain on."""
    stored = json.loads(terms.read_text(encoding="utf-8"))
    return TermSplit([], *([TermItem(**term) for term in stored[name]] for name in ("fit", "test")))


def example_terms() -> list[Term]:
    """The terms of ``example:hpo``."""
    return list(read_obo_terms(find_example("hpo")[1]))


def measure_terms(module: LitEncoder, split: TermSplit, sequence_length: int) -> dict[str, float]:
    """Accuracy of the branch, and nDCG@10 of the definition among all tested ones.

    Args:
        module: of the model.
        split: of the terms.
        sequence_length: longest text, in tokens.

    Returns:
        "classification" and "retrieval", each in [0, 1].
    """
    vectors = {
        name: embed(module, [term.definition for term in terms], sequence_length=sequence_length)
        for name, terms in (("fit", split.fit), ("test", split.test))
    }
    queries = {
        name: embed(module, [terms[place].synonym for place in named], sequence_length=sequence_length)
        for name, terms, named in (
            ("fit", split.fit, _with_synonym(split.fit)),
            ("test", split.test, _with_synonym(split.test)),
        )
    }
    return {"classification": _classify(vectors, split), "retrieval": _retrieve(queries, vectors, split)}


def _with_synonym(terms: Sequence[TermItem]) -> list[int]:
    return [place for place, term in enumerate(terms) if term.synonym]


def _classify(vectors: Mapping[str, Tensor], split: TermSplit) -> float:
    fitted, tested = ([place for place, term in enumerate(terms) if term.branch] for terms in (split.fit, split.test))
    probe = fit_classifier(vectors["fit"][fitted], [split.fit[place].branch for place in fitted])
    return float(probe.score(vectors["test"][tested].numpy(), [split.test[place].branch for place in tested]))


def _retrieve(queries: Mapping[str, Tensor], vectors: Mapping[str, Tensor], split: TermSplit) -> float:
    matrix = fit_projection(queries["fit"], vectors["fit"][_with_synonym(split.fit)])
    documents = {str(place): term.definition for place, term in enumerate(split.test)}
    asked = [
        Query(f"synonym of {place}", split.test[place].synonym, {str(place): 1.0})
        for place in _with_synonym(split.test)
    ]
    scores = ranking_scores(queries["test"] @ matrix, vectors["test"] @ matrix, Collection(documents, asked))
    return scores.value("ndcg@10")
