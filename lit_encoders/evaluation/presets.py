"""Tasks of the example texts, ready to run: `lit-encoders evaluate --tasks hpo_branches`.

Test terms of an ontology are those that ``data.val_share=0.1`` holds out of its definitions, so that a model trained so
has not read them. Texts without a split of their own are split in the same way, by content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TypeVar

from lit_encoders.data import example_readers as readers
from lit_encoders.data.examples import find_example
from lit_encoders.data.ontology import branches, read_obo_terms
from lit_encoders.data.sources import in_split
from lit_encoders.evaluation.classification import Classification
from lit_encoders.evaluation.finetuning import FineTuning
from lit_encoders.evaluation.items import Collection, LabelledText, Query, TaggedWords
from lit_encoders.evaluation.retrieval import Retrieval
from lit_encoders.evaluation.tagging_task import Tagging
from lit_encoders.evaluation.task_base import Task

Item = TypeVar("Item")
HELD_OUT = 0.1
_HPO_ROOT = "HP:0000118"
# vbd, or vbd of vbd+rp-tl; punctuation stands for itself.
_BASE_TAG = re.compile(r"[a-z]+|--|\S")


def hpo_branches() -> tuple[list[LabelledText], list[LabelledText]]:
    """Definitions of the Human Phenotype Ontology, by the one organ system that they stand below."""
    terms = list(read_obo_terms(find_example("hpo")[1]))
    above = branches(terms, _HPO_ROOT)
    items = [
        LabelledText(term.definition, next(iter(above[term.id])))
        for term in terms
        if term.definition and len(above[term.id]) == 1
    ]
    train, test = _by_content(items, lambda item: item.text)
    # A class of a handful may be absent from one side.
    known = {item.label for item in train}
    return train, [item for item in test if item.label in known]


def hpo_synonyms() -> tuple[Collection | None, Collection]:
    """A synonym of a phenotype as query, the definitions of its side that have one as documents."""
    pairs = [
        (synonym, term.definition)
        for term in read_obo_terms(find_example("hpo")[1])
        if term.definition
        for synonym in term.synonyms[:1]
        # What the definition says itself would be found without understanding.
        if synonym.lower() not in term.definition.lower()
    ]
    return _collections(pairs)


def go_synonyms() -> tuple[Collection | None, Collection]:
    """A synonym of a gene function as query, definitions of the Gene Ontology as documents."""
    seen: dict[str, str] = {}
    for synonym, definition in readers.read_go_synonyms(find_example("go")[1]):
        if synonym.lower() not in definition.lower():
            seen.setdefault(definition, synonym)
    return _collections((synonym, definition) for definition, synonym in seen.items())


def icd10_fr() -> tuple[Collection | None, Collection]:
    """A French title of ICD-10 as query, the English ones as documents."""
    path = find_example("icd10-fr")[1]
    return _collections((french, english) for english, french in readers.read_po_pairs(path) if french)


def tweets() -> tuple[list[TaggedWords], list[TaggedWords]]:
    """Entities in tweets; there is no test split, so one is made."""
    sentences = readers.read_tagged_sentences(find_example("tweets")[1])
    items = [TaggedWords(tuple(words), tuple(tags)) for words, tags in sentences]
    return _by_content(items, lambda item: " ".join(item.words), share=0.2)


def brown() -> tuple[list[TaggedWords], list[TaggedWords]]:
    """Parts of speech of the Brown corpus, of joined tags the first, without suffixes; whole texts are held out.

    Wins and losses are counted by genre, the letter of a text.
    """
    sentences = readers.read_brown_sentences(find_example("brown")[1])
    items: dict[bool, list[TaggedWords]] = {False: [], True: []}
    for name, words, tags in sentences:
        plain = tuple(_BASE_TAG.findall(tag)[0] for tag in tags)
        items[in_split(name, HELD_OUT)].append(TaggedWords(tuple(words), plain, name[1]))
    known = {tag for item in items[False] for tag in item.tags}
    return items[False], [item for item in items[True] if set(item.tags) <= known]


def _labelled(train: str, test: str) -> Callable[[], tuple[list[LabelledText], list[LabelledText]]]:
    def read() -> tuple[list[LabelledText], list[LabelledText]]:
        sides = [
            [LabelledText(text, label) for label, text in readers.read_tab_records(find_example(name)[1])]
            for name in (train, test)
        ]
        return sides[0], sides[1]

    return read


def _by_content(
    items: Iterable[Item], content: Callable[[Item], str], share: float = HELD_OUT
) -> tuple[list[Item], list[Item]]:
    """Split items by the hash of their content: the share goes to the second list."""
    sides: tuple[list[Item], list[Item]] = ([], [])
    for item in items:
        sides[in_split(content(item), share)].append(item)
    return sides


def _collections(pairs: Iterable[tuple[str, str]]) -> tuple[Collection, Collection]:
    """Collections to learn from and to test on, split by document."""
    sides = _by_content(pairs, lambda pair: pair[1])
    made = []
    for side in sides:
        numbers: dict[str, str] = {}
        queries: list[Query] = []
        for query, document in side:
            number = numbers.setdefault(document, f"d{len(numbers)}")
            queries.append(Query(f"q{len(queries)}", query, {number: 1.0}))
        made.append(Collection({number: text for text, number in numbers.items()}, queries))
    return made[0], made[1]


PRESETS: dict[str, Task] = {
    task.name: task
    for task in (
        Classification("hpo_branches", read=hpo_branches, mode="probe", fine_tuning=FineTuning(sequence_length=128)),
        Retrieval("hpo_synonyms", read=hpo_synonyms, fine_tuning=FineTuning(sequence_length=128, batch=64)),
        Retrieval("go_synonyms", read=go_synonyms, fine_tuning=FineTuning(sequence_length=128, batch=64)),
        Retrieval("icd10_fr", read=icd10_fr, fine_tuning=FineTuning(sequence_length=64, batch=64)),
        Classification("r8", read=_labelled("r8", "r8-test")),
        Classification("r52", read=_labelled("r52", "r52-test")),
        Classification("newsgroups", read=_labelled("newsgroups", "newsgroups-test")),
        Tagging("tweets", read=tweets, fine_tuning=FineTuning(sequence_length=128)),
        Tagging("brown", read=brown, scheme="words", fine_tuning=FineTuning(epochs=1, sequence_length=128)),
    )
}
