"""Ranking documents for queries with graded answers: nDCG, MRR and recall of each query.

Gains are the grades themselves, as trec_eval has them. A document with the id of the query is ranked like any other
unless asked otherwise: leaving such hits out helps some collections and harms others, so the result says which it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from lit_encoders.evaluation.items import Collection, Query
from lit_encoders.evaluation.scores import Combine, FloatArray, Scores, column_ratio

# Cosines that differ by less are equal: a product rounds one and the same cosine differently in another place.
_STEPS = 2.0**40


def top_documents(
    queries: Tensor,
    documents: Tensor,
    count: int,
    relevant: Sequence[Sequence[int]],
    left_out: Sequence[int] | None = None,
    block: int = 1024,
) -> list[list[int]]:
    """The documents that are closest to each query by cosine, the closest first; of equals the wanted ones come last,
    the best of them at the very end.

    So a model that embeds all texts alike, or as what is no number, finds nothing.

    Args:
        queries: vectors, (Q, D).
        documents: vectors, (N, D).
        count: how many for each.
        relevant: for each query the documents that answer it, the best last.
        left_out: for each query a document that is not ranked, or -1; None ranks all.
        block: queries compared at once.

    >>> documents = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> top_documents(torch.tensor([[1.0, 0.1], [1.0, 1.0]]), documents, 3, [[0], [0]])
    [[0, 2, 1], [2, 1, 0]]
    """
    found: list[list[int]] = []
    documents = normalize(documents.double(), dim=1)
    for start in range(0, len(queries), block):
        cosines = normalize(queries[start : start + block].double(), dim=1) @ documents.T
        scores = (cosines * _STEPS).round().nan_to_num(nan=-2 * _STEPS)
        for row, wanted in enumerate(relevant[start : start + block]):
            # Below the other equals, and above all that are further: those are a whole step away.
            shares = torch.linspace(0.25, 0.75, len(wanted), dtype=torch.float64, device=scores.device)
            scores[row, list(wanted)] -= shares
            if left_out is not None and left_out[start + row] >= 0:
                scores[row, left_out[start + row]] = -torch.inf
        order = scores.argsort(dim=1, descending=True, stable=True)[:, : count + 1].tolist()
        for row, places in enumerate(order):
            absent = -1 if left_out is None else left_out[start + row]
            found.append([place for place in places if place != absent][:count])
    return found


def query_scores(ranked: Sequence[str], query: Query, cutoff: int = 10) -> tuple[float, float, float]:
    """Reach nDCG, reciprocal rank and recall of one query, each at a cutoff.

    Args:
        ranked: ids of documents, the best first.
        query: with the grades of its documents.
        cutoff: places that count.

    >>> query = Query("q", "?", {"a": 1.0, "b": 1.0})
    >>> [round(value, 4) for value in query_scores(["x", "a", "b"], query)]
    [0.6934, 0.5, 1.0]
    """
    discounts = 1 / np.log2(np.arange(2, cutoff + 2))
    gains = np.array([query.relevant.get(document, 0.0) for document in ranked[:cutoff]])
    ideal = np.sort(list(query.relevant.values()))[::-1][:cutoff]
    ndcg = float(gains @ discounts[: len(gains)]) / float(ideal @ discounts[: len(ideal)])
    hits = np.flatnonzero(gains > 0)
    return ndcg, 1 / (int(hits[0]) + 1) if len(hits) else 0.0, len(hits) / len(query.relevant)


def ranking_scores(
    queries: Tensor, documents: Tensor, collection: Collection, cutoff: int = 10, drop_self_matches: bool = False
) -> Scores:
    """Rank a collection's documents by cosine, and score each query.

    Args:
        queries: a vector for each query, (Q, D).
        documents: a vector for each document, (N, D).
        collection: that they are of.
        cutoff: places that count.
        drop_self_matches: leave out a document that has the query's id.
    """
    ids = list(collection.documents)
    numbers = {name: place for place, name in enumerate(ids)}
    own = [numbers.get(query.id, -1) for query in collection.queries] if drop_self_matches else None
    wanted = [
        [numbers[name] for name, _ in sorted(query.relevant.items(), key=lambda judged: judged[1])]
        for query in collection.queries
    ]
    top = top_documents(queries, documents, cutoff, wanted, own)
    values: FloatArray = np.array(
        [
            query_scores([ids[place] for place in places], query, cutoff)
            for places, query in zip(top, collection.queries, strict=True)
        ]
    )
    counts = np.concatenate([values, np.ones((len(values), 1))], axis=1)
    names = (f"ndcg@{cutoff}", f"mrr@{cutoff}", f"recall@{cutoff}")
    metrics: dict[str, Combine] = {name: column_ratio(place, 3) for place, name in enumerate(names)}
    return Scores(counts, metrics, values[:, 0])
