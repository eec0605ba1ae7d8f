"""Finding one document among many: ranks, and the usual figures of them.

Sources: nDCG, Jaervelin, Kekaelaeinen (2002), doi:10.1145/582415.582418; MRR, Voorhees (1999), TREC-8.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

# A matrix product rounds the cosine of one and the same document differently, by the place that it stands in.
_ROUNDING = 1e-12


def ranks(queries: Tensor, documents: Tensor, relevant: Tensor, block: int = 1024) -> Tensor:
    """The place of each query's document among all of them by cosine, from 1; of equals the wanted one comes last.

    Args:
        queries: vectors, (Q, D).
        documents: vectors, (N, D).
        relevant: for each query the number of the one document that answers it, int64 (Q,).
        block: queries compared at once.

    Returns:
        int64 (Q,).

    >>> documents = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> ranks(torch.tensor([[1.0, 0.1], [1.0, 1.0]]), documents, torch.tensor([0, 1])).tolist()
    [1, 3]
    """
    documents = normalize(documents.double(), dim=1)
    found = []
    for start in range(0, len(queries), block):
        scores = normalize(queries[start : start + block].double(), dim=1) @ documents.T
        wanted = scores.gather(1, relevant[start : start + block, None])
        # What is no number is no better than the rest.
        found.append((~(scores < wanted - _ROUNDING)).sum(1))
    return torch.cat(found)


def mean_reciprocal_rank(ranks: Tensor, cutoff: int = 10) -> float:
    """MRR@cutoff: the mean of one over the rank, 0 beyond the cutoff.

    >>> mean_reciprocal_rank(torch.tensor([1, 2, 11]))
    0.5
    """
    return float((1 / ranks.double()).where(ranks <= cutoff, 0.0).mean())


def ndcg(ranks: Tensor, cutoff: int = 10) -> float:
    """NDCG@cutoff where one document is relevant: the mean of ``1 / log2(1 + rank)``, 0 beyond the cutoff.

    >>> ndcg(torch.tensor([1, 3, 11]))
    0.5
    """
    return float((1 / torch.log2(1 + ranks.double())).where(ranks <= cutoff, 0.0).mean())


def recall(ranks: Tensor, cutoff: int = 10) -> float:
    """Share of queries whose document is among the first.

    >>> recall(torch.tensor([1, 3, 11, 12]))
    0.5
    """
    return float((ranks <= cutoff).double().mean())
