"""Tasks of an ontology's terms: what is held out from what, and figures by scikit-learn."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lit_encoders import LitMLM
from lit_encoders.data.ontology import Term
from lit_encoders.evaluation.embeddings import embed
from lit_encoders.evaluation.linear_probes import fit_projection
from lit_encoders.studies.term_tasks import TermItem, TermSplit, measure_terms, split_terms

BRANCHES = ("a", "b", "c")


def made_up_terms(count: int = 60) -> list[Term]:
    """Terms whose words are those of their branch; every fifth has two branches, every seventh no synonym."""
    draw = random.Random(0)
    terms = [Term("root", "root", "", (), ()), *(Term(name, name, "", (), ("root",)) for name in BRANCHES)]
    for number in range(count):
        branch = number % 3
        words = [f"w{30 * branch + draw.randrange(30)}" for _ in range(8)]
        parents = BRANCHES[branch : branch + 1] if number % 5 else BRANCHES[:2]
        synonyms = (" ".join(words[:2]), f"{words[5]} {words[1]}") if number % 7 else ()
        terms.append(Term(f"t{number}", f"term {number}", f"{' '.join(words)} w{number % 90}.", synonyms, parents))
    return terms


@pytest.fixture(scope="module")
def split() -> TermSplit:
    return split_terms(made_up_terms(), "root", fit=25, test=20)


def definitions(items: list[TermItem]) -> set[str]:
    return {item.definition for item in items}


def test_parts_are_disjoint_and_whole(split: TermSplit) -> None:
    fit, test, pretraining = definitions(split.fit), definitions(split.test), set(split.pretraining)
    assert (len(split.fit), len(split.test), len(split.pretraining)) == (25, 20, 40)
    assert not test & pretraining
    assert not test & fit
    assert fit < pretraining
    assert test | pretraining == {term.definition for term in made_up_terms() if term.definition}


def test_a_definition_that_is_also_a_tested_ones_is_in_no_other_part() -> None:
    """Every definition stands twice, so whatever is tested has a twin."""
    once = made_up_terms()
    twins = [replace(term, id=f"{term.id}'") for term in once if term.definition]
    split = split_terms([*once, *twins], "root", fit=20, test=30)
    assert not definitions(split.test) & {*definitions(split.fit), *split.pretraining}
    assert definitions(split.fit) <= set(split.pretraining)
    assert len(split.fit) == 20
    assert len(split.pretraining) < 2 * 60 - 30


def test_items_are_as_documented() -> None:
    def term(name: str, synonyms: tuple[str, ...], *parents: str) -> Term:
        return Term(name, f"name of {name}", f"Definition of {name}.", synonyms, parents)

    top = [Term("root", "", "", (), ()), *(Term(name, "", "", (), ("root",)) for name in BRANCHES)]
    below = [
        term("one", ("an other", "a third"), "a"),
        term("two", (), "a", "b"),
        term("none", ("DEFINITION OF", "of none", "another"), "elsewhere"),
        term("deep", ("definition of deep.",), "one", "a"),
    ]
    terms = [*top, *below, term("rest", (), "c")]
    splits = [split_terms(terms, "root", fit=2, test=2, seed=seed) for seed in range(5)]
    assert {item for split in splits for item in (*split.fit, *split.test)} == {
        TermItem("Definition of one.", "a", "an other"),
        TermItem("Definition of two.", "", ""),
        TermItem("Definition of none.", "", "another"),
        TermItem("Definition of deep.", "a", ""),
        TermItem("Definition of rest.", "c", ""),
    }


def test_seed_decides() -> None:
    terms = made_up_terms()
    first = split_terms(terms, "root", 25, 20)
    assert split_terms(terms, "root", 25, 20, seed=0) == first
    assert split_terms(terms, "root", 25, 20, seed=1) != first
    # Fewer terms for the probes leave the tested ones as they are.
    assert split_terms(terms, "root", 5, 20).test == first.test


def test_too_few_terms_are_said() -> None:
    with pytest.raises(ValueError, match=r"^terms with a definition must be more than 60, got 60$"):
        split_terms(made_up_terms(), "root", 30, 30)
    twins = [Term(f"t{number}", "", "The same.", (), ()) for number in range(9)]
    with pytest.raises(ValueError, match=r"^terms with other definitions than the tested must be more than 2, got 0$"):
        split_terms(twins, "root", 2, 2)


def test_figures_are_those_of_scikit_learn(bert_folder: Path, split: TermSplit) -> None:
    """Terms without a branch are not classified, but found among; those without a synonym are not asked for."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import ndcg_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    module = LitMLM(str(bert_folder))
    found = measure_terms(module, split, sequence_length=32)
    assert set(found) == {"classification", "retrieval"}

    def vectors(texts: list[str]) -> torch.Tensor:
        return embed(module, texts, sequence_length=32)

    classified = [[item for item in items if item.branch] for items in (split.fit, split.test)]
    x_fit, x_test = (vectors([item.definition for item in items]).numpy() for items in classified)
    y_fit, y_test = ([item.branch for item in items] for items in classified)
    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)).fit(x_fit, y_fit)
    assert len(y_test) < 20
    assert found["classification"] == pytest.approx((probe.predict(x_test) == y_test).mean())

    asked = [[item for item in items if item.synonym] for items in (split.fit, split.test)]
    matrix = fit_projection(*(vectors([getattr(item, key) for item in asked[0]]) for key in ("synonym", "definition")))
    queries = vectors([item.synonym for item in asked[1]]) @ matrix
    documents = vectors([item.definition for item in split.test]) @ matrix
    cosines = torch.nn.functional.cosine_similarity(queries.double()[:, None], documents.double()[None], dim=2)
    relevant = [[item is other for other in split.test] for item in asked[1]]
    assert len(asked[1]) < 20
    assert found["retrieval"] == pytest.approx(ndcg_score(relevant, cosines.numpy(), k=10))


def test_figures_say_what_is_at_hand(bert_folder: Path, split: TermSplit) -> None:
    """Words tell the branches apart; with classes dealt out anew there is nothing to find."""
    module = LitMLM(str(bert_folder))
    measured = measure_terms(module, split, 32)
    branches = [item.branch for item in split.test]
    wrong = [replace(item, branch=branches[place - 1]) for place, item in enumerate(split.test)]
    shuffled = measure_terms(module, replace(split, test=wrong), 32)
    assert all(0 <= value <= 1 for value in (*measured.values(), *shuffled.values()))
    assert measured["classification"] > 0.8 > 0.6 > shuffled["classification"]
    assert shuffled["retrieval"] == measured["retrieval"]


def test_no_more_is_read_than_the_length_given(bert_folder: Path, split: TermSplit) -> None:
    module = LitMLM(str(bert_folder))
    assert measure_terms(module, split, 4) != measure_terms(module, split, 32)
