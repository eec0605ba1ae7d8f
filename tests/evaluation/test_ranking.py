"""Ranking against a plain sort, and figures against torchmetrics."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from lit_encoders.evaluation.items import Collection, Query
from lit_encoders.evaluation.ranking import query_scores, ranking_scores, top_documents


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def draw_relevant(queries: int, documents: int) -> list[int]:
    return torch.randint(documents, (queries,), generator=torch.Generator().manual_seed(1)).tolist()


def rank_of(queries: Tensor, documents: Tensor, relevant: list[int], block: int = 1024) -> list[int]:
    """Place of each query's own document, from 1."""
    ranked = top_documents(queries, documents, len(documents), [[wanted] for wanted in relevant], block=block)
    return [1 + places.index(wanted) for places, wanted in zip(ranked, relevant, strict=True)]


def collection(relevant: list[dict[str, float]], size: int) -> Collection:
    queries = [Query(f"q{number}", "?", grades) for number, grades in enumerate(relevant)]
    return Collection({f"d{number}": "" for number in range(size)}, queries)


def test_order_is_that_of_a_sort() -> None:
    queries, documents, relevant = draw(50, 8), 3 * draw(40, 8, seed=1), draw_relevant(50, 40)
    found = top_documents(queries, documents, 7, [[wanted] for wanted in relevant])
    rows = documents.double().numpy()
    for query, places in zip(queries.double().numpy(), found, strict=True):
        assert places == np.argsort(-(rows @ query) / np.linalg.norm(rows, axis=1))[:7].tolist()


def test_length_of_a_vector_does_not_count() -> None:
    documents = torch.tensor([[100.0, 100.0], [0.1, 0.0]])
    assert top_documents(torch.tensor([[5.0, 0.0]]), documents, 2, [[0]]) == [[1, 0]]


def test_ties_count_against() -> None:
    # Three of one direction, and two that are further.
    documents = torch.tensor([[1.0, 1.0], [2.0, 2.0], [1.0, 0.0], [0.0, 1.0], [4.0, 4.0]])
    queries = torch.tensor([[1.0, 0.5]]).expand(5, 2)
    assert rank_of(queries, documents, [0, 1, 2, 3, 4]) == [3, 3, 4, 5, 3]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_of_equal_documents_the_better_ones_come_later_wherever_they_stand(place: int) -> None:
    grades = {f"d{(place + shift) % 3}": grade for shift, grade in enumerate([3.0, 1.0])}
    scores = ranking_scores(torch.ones(1, 4), torch.ones(3, 4), collection([grades], 3))
    # Not relevant, then 1, then 3.
    expected = (1 / np.log2(3) + 3 / np.log2(4)) / (3 + 1 / np.log2(3))
    assert scores.value("ndcg@10") == pytest.approx(expected)
    assert scores.value("mrr@10") == 0.5


@pytest.mark.parametrize(("documents", "dims"), [(13, 7), (50, 32), (501, 384)])
def test_equal_documents_have_equal_ranks_wherever_they_stand(documents: int, dims: int) -> None:
    """A matrix product rounds one and the same product differently from place to place."""
    once = draw(documents, dims)
    order = torch.randperm(documents, generator=torch.Generator().manual_seed(2))
    twice = torch.cat([once, once[order], once[:1]])
    queries, relevant = draw(64, dims, seed=1), draw_relevant(64, documents)
    alone = rank_of(queries, once, relevant)
    cosines = normalize(queries.double(), dim=1) @ normalize(once.double(), dim=1).T
    first_too = cosines[:, 0] > cosines.gather(1, torch.tensor(relevant)[:, None])[:, 0] - 1e-9
    assert rank_of(queries, twice, relevant) == [2 * a + int(b) for a, b in zip(alone, first_too, strict=True)]


def test_documents_of_one_direction_are_equal_whatever_their_lengths() -> None:
    """Their cosines differ in the last bits."""
    once, queries, relevant = draw(50, 32).double(), draw(64, 32, seed=1), draw_relevant(64, 50)
    expected = [3 * rank for rank in rank_of(queries, once, relevant)]
    for first in (0, 50, 100):
        documents = torch.cat([once, 3 * once, 0.7 * once])
        assert rank_of(queries, documents, [first + wanted for wanted in relevant]) == expected


def test_blocks_do_not_matter() -> None:
    documents = draw(30, 8).repeat(2, 1)
    queries, relevant = draw(50, 8, seed=1), [[wanted] for wanted in draw_relevant(50, 60)]
    left_out = [number % 60 if number % 3 else -1 for number in range(50)]
    whole = top_documents(queries, documents, 60, relevant, left_out)
    assert all(left not in places for left, places in zip(left_out, whole, strict=True))
    for block in (1, 7, 50, 51):
        assert top_documents(queries, documents, 60, relevant, left_out, block=block) == whole


@pytest.mark.parametrize("value", [float("nan"), 0.0, 1.0])
def test_vectors_that_say_nothing_find_nothing(value: float) -> None:
    same = torch.full((20, 4), value)
    scores = ranking_scores(same[:5], same, collection([{f"d{number}": 1.0} for number in range(5)], 20))
    assert [scores.value(name) for name in scores.metrics] == [0.0, 0.0, 0.0]
    if value != value:
        assert ranking_scores(same[:1], draw(20, 4), collection([{"d0": 1.0}], 20)).value("recall@10") == 0.0


def test_documents_that_are_no_numbers_come_last() -> None:
    documents = draw(20, 4)
    documents[3] = float("nan")
    for wanted in (3, 5):
        (places,) = top_documents(-documents[5:6], documents, 20, [[wanted]])
        assert places[-2:] == [5, 3]


@pytest.mark.parametrize("answers", [1, 4, 14])
@pytest.mark.parametrize("cutoff", [1, 3, 10])
def test_figures_are_those_of_torchmetrics(cutoff: int, answers: int) -> None:
    from torchmetrics.retrieval import RetrievalMRR, RetrievalNormalizedDCG, RetrievalRecall

    count, size = 60, 25
    queries, documents = draw(count, 6), draw(size, 6, seed=3)
    generator = np.random.default_rng(answers)
    grades = np.zeros((count, size))
    for row in grades:
        row[generator.choice(size, size=answers, replace=False)] = generator.integers(1, 4, size=answers)
    relevant = [{f"d{place}": float(row[place]) for place in np.flatnonzero(row)} for row in grades]
    scores = ranking_scores(queries, documents, collection(relevant, size), cutoff)
    # torchmetrics takes no document with a score below 0.
    cosines = 2 + (normalize(queries.double(), dim=1) @ normalize(documents.double(), dim=1).T).flatten()
    which = torch.arange(count)[:, None].expand(count, size).flatten()
    target = torch.from_numpy(grades).long().flatten()
    expected = {
        f"ndcg@{cutoff}": RetrievalNormalizedDCG(top_k=cutoff)(cosines, target, indexes=which),
        f"mrr@{cutoff}": RetrievalMRR(top_k=cutoff)(cosines, target > 0, indexes=which),
        f"recall@{cutoff}": RetrievalRecall(top_k=cutoff)(cosines, target > 0, indexes=which),
    }
    found = {name: scores.value(name) for name in scores.metrics}
    assert found == pytest.approx({name: float(value) for name, value in expected.items()}, rel=1e-6)
    assert 0 < found[f"ndcg@{cutoff}"] < 1
    assert scores.points.mean() == pytest.approx(found[f"ndcg@{cutoff}"])


def test_figures_of_resampled_queries_are_means_over_those() -> None:
    scores = ranking_scores(draw(30, 4), draw(40, 4, seed=1), collection([{f"d{n}": 1.0} for n in range(30)], 40))
    weights = np.random.default_rng(0).multinomial(30, np.full(30, 1 / 30))
    expected = np.repeat(scores.points, weights).mean()
    assert scores.metrics["ndcg@10"](weights @ scores.counts) == pytest.approx(expected)


def test_e03_a_hit_with_the_querys_id_counts_unless_it_is_left_out() -> None:
    """Three queries, four documents, one shared id that is truly relevant."""
    vectors = torch.eye(4)
    documents = dict.fromkeys(("shared", "d1", "d2", "d3"), "")
    queries = [Query("shared", "", {"shared": 1.0}), Query("q1", "", {"d1": 1.0}), Query("q2", "", {"d2": 1.0})]
    both = Collection(documents, queries)
    assert ranking_scores(vectors[:3], vectors, both).value("ndcg@10") == 1.0
    assert ranking_scores(vectors[:3], vectors, both, drop_self_matches=True).value("ndcg@10") == pytest.approx(2 / 3)
    # Where the query's own text stands among the documents and is no answer, leaving it out is right.
    search = replace(both, queries=[Query("shared", "", {"d1": 1.0})])
    close = torch.tensor([[1.0, 0.5, 0.0, 0.0]])
    assert ranking_scores(close, vectors, search).value("mrr@10") == 0.5
    assert ranking_scores(close, vectors, search, drop_self_matches=True).value("mrr@10") == 1.0


def test_answers_beyond_the_cutoff_are_missed() -> None:
    query = Query("q", "?", {"a": 1.0, "b": 1.0})
    ranked = ["x", "a", *"0123456", "b"]
    assert query_scores(ranked, query)[1:] == (0.5, 1.0)
    assert query_scores(["y", *ranked], query)[1:] == (pytest.approx(1 / 3), 0.5)
    assert query_scores(["x"], query) == (0.0, 0.0, 0.0)
