"""Ranks by a loop over all documents; figures by torchmetrics."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from lit_encoders.evaluation.retrieval import mean_reciprocal_rank, ndcg, ranks, recall


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def draw_relevant(queries: int, documents: int) -> Tensor:
    return torch.randint(documents, (queries,), generator=torch.Generator().manual_seed(1))


def test_ranks_are_those_of_a_sort() -> None:
    queries, documents, relevant = draw(50, 8), 3 * draw(40, 8, seed=1), draw_relevant(50, 40)
    expected = []
    for query, wanted in zip(queries.double().numpy(), relevant.tolist(), strict=True):
        rows = documents.double().numpy()
        order = np.argsort(-(rows @ query) / np.linalg.norm(rows, axis=1) / np.linalg.norm(query))
        expected.append(1 + int(np.flatnonzero(order == wanted)[0]))
    assert ranks(queries, documents, relevant).tolist() == expected
    assert len(set(expected)) > 20


def test_length_of_a_vector_does_not_count() -> None:
    documents = torch.tensor([[100.0, 100.0], [0.1, 0.0]])
    assert ranks(torch.tensor([[5.0, 0.0]]), documents, torch.tensor([1])).tolist() == [1]


def test_ties_count_against() -> None:
    # Three of one direction, and two that are further.
    documents = torch.tensor([[1.0, 1.0], [2.0, 2.0], [1.0, 0.0], [0.0, 1.0], [4.0, 4.0]])
    queries = torch.tensor([[1.0, 0.5]]).expand(5, 2)
    assert ranks(queries, documents, torch.arange(5)).tolist() == [3, 3, 4, 5, 3]


@pytest.mark.parametrize(("documents", "dims"), [(13, 7), (50, 32), (501, 384)])
def test_equal_documents_have_equal_ranks_wherever_they_stand(documents: int, dims: int) -> None:
    """A matrix product rounds one and the same product differently from place to place."""
    once = draw(documents, dims)
    order = torch.randperm(documents, generator=torch.Generator().manual_seed(2))
    twice = torch.cat([once, once[order], once[:1]])
    queries, relevant = draw(64, dims, seed=1), draw_relevant(64, documents)
    alone = ranks(queries, once, relevant)
    cosines = normalize(queries.double(), dim=1) @ normalize(once.double(), dim=1).T
    first_too = cosines[:, 0] > cosines.gather(1, relevant[:, None])[:, 0] - 1e-9
    assert torch.equal(ranks(queries, twice, relevant), 2 * alone + first_too)


def test_blocks_do_not_matter() -> None:
    documents = draw(30, 8).repeat(2, 1)
    queries, relevant = draw(50, 8, seed=1), draw_relevant(50, 60)
    whole = ranks(queries, documents, relevant)
    for block in (1, 7, 50, 51):
        assert torch.equal(ranks(queries, documents, relevant, block=block), whole)


def test_vectors_that_are_no_numbers_find_nothing() -> None:
    found = ranks(torch.full((1, 4), float("nan")), draw(20, 4), torch.tensor([0]))
    assert found.tolist() == [20]
    assert mean_reciprocal_rank(found) == ndcg(found) == recall(found) == 0.0


@pytest.mark.parametrize("cutoff", [1, 3, 10])
def test_figures_are_those_of_torchmetrics(cutoff: int) -> None:
    from torchmetrics.retrieval import RetrievalMRR, RetrievalNormalizedDCG, RetrievalRecall

    count, size = 60, 25
    queries, documents, relevant = draw(count, 6), draw(size, 6, seed=1), draw_relevant(count, size)
    scores = normalize(queries, dim=1) @ normalize(documents, dim=1).T
    target = torch.arange(size) == relevant[:, None]
    which = torch.arange(count)[:, None].expand(count, size)
    found = ranks(queries, documents, relevant)
    assert (found > 10).any()
    for ours, theirs in (
        (mean_reciprocal_rank, RetrievalMRR),
        (ndcg, RetrievalNormalizedDCG),
        (recall, RetrievalRecall),
    ):
        expected = theirs(top_k=cutoff)(scores.flatten(), target.flatten(), indexes=which.flatten())
        assert ours(found, cutoff) == pytest.approx(float(expected), rel=1e-6)
        assert 0 < ours(found, cutoff) < 1


def test_figures_are_at_ten() -> None:
    found = torch.tensor([10, 11])
    assert mean_reciprocal_rank(found) == pytest.approx(0.05)
    assert ndcg(found) == pytest.approx(0.5 / np.log2(11))
    assert recall(found) == 0.5
