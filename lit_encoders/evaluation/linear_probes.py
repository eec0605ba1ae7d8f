"""What can be read off embeddings by one linear map: classes by logistic regression, matches by a projection.

The encoder rests, so a probe costs seconds; it says what an encoder has at hand, not what fine-tuning would make of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline


def fit_classifier(embeddings: Tensor, labels: Sequence[str], max_steps: int = 1000, strength: float = 1.0) -> Pipeline:
    """Fit a logistic regression on standardised embeddings.

    Args:
        embeddings: (N, D).
        labels: one for each.
        max_steps: of the solver.
        strength: how much the data count against the penalty on weights, above 0.

    Raises:
        ValueError: scikit-learn is not installed.
    """
    try:
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
    except ImportError:
        raise ValueError("a classifier needs scikit-learn: pip install scikit-learn") from None
    probe = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=max_steps))
    return probe.fit(embeddings.numpy(), list(labels))  # type: ignore[no-any-return]


def fit_projection(
    queries: Tensor,
    documents: Tensor,
    *,
    steps: int = 300,
    batch: int = 256,
    learning_rate: float = 1e-3,
    temperature: float = 0.05,
    seed: int = 0,
) -> Tensor:
    """Fit one matrix for queries and documents, so that each query is closest to its own document.

    The loss is that of in-batch negatives, both ways (the queries' and the documents'): cross-entropy over cosines
    divided by a temperature. It starts at the identity, so without steps the embeddings are compared as they are.

    Args:
        queries: vectors, (N, D).
        documents: the vector of each query's document, (N, D).
        steps: of Adam.
        batch: pairs of a step; all pairs, where there are fewer.
        learning_rate: of Adam; it falls to 0 as a line.
        temperature: of the cosines.
        seed: of the pairs drawn.

    Returns:
        float32 (D, D); multiply embeddings with it from the right.
    """
    generator = torch.Generator().manual_seed(seed)
    matrix = nn.Parameter(torch.eye(queries.shape[1]))
    adam = torch.optim.Adam([matrix], lr=learning_rate)
    for step in range(steps):
        adam.param_groups[0]["lr"] = learning_rate * (1 - step / steps)
        drawn = torch.randperm(len(queries), generator=generator)[:batch]
        scores = normalize(queries[drawn] @ matrix, dim=1) @ normalize(documents[drawn] @ matrix, dim=1).T
        own = torch.arange(len(drawn))
        loss = (cross_entropy(scores / temperature, own) + cross_entropy(scores.T / temperature, own)) / 2
        adam.zero_grad()
        loss.backward()
        adam.step()
    return matrix.detach()
