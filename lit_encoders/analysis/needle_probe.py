"""A small probe that compares two embeddings: is what the question states in the document?

The features are those of sentence pairs in Conneau et al. (2017), arXiv:1705.02364: both vectors, their product and the
distance between them, dimension by dimension. Logistic regression on them has one optimum, so that "enough steps" can
be checked and not only hoped for.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lit_encoders.evaluation.linear_probes import fit_classifier

if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline

# How much the pairs count against the penalty on weights, to choose from on pairs held out of the fit.
STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
# The solver is through after 10 to 50 steps here.
MAX_STEPS = 2000
# Every fourth document is held out to choose the strength.
_HELD_OUT = 4


@dataclass(frozen=True)
class Pairs:
    """Documents with their questions.

    Attributes:
        documents: vectors, (N, D).
        questions: vectors, (N, D).
        labels: whether the document has what the question states, bool (N,).
        groups: number of each pair's document, int64 (N,): pairs of one document are never on both sides of a choice.
    """

    documents: Tensor
    questions: Tensor
    labels: Tensor
    groups: Tensor

    def shuffled(self, key: str) -> Pairs:
        """The same pairs with their labels dealt out anew, as many of each as before."""
        order = list(range(len(self.labels)))
        random.Random(f"shuffled {key}").shuffle(order)
        return Pairs(self.documents, self.questions, self.labels[torch.tensor(order)], self.groups)


def ask_both(documents: Tensor, facts: Tensor, near_misses: Tensor) -> Pairs:
    """Ask every document for its fact and for the near miss: to fit on, each document says as much of yes as of no.

    Args:
        documents, facts, near_misses: vectors, (N, D).

    Returns:
        2N pairs.
    """
    count = len(documents)
    labels = torch.arange(2 * count) < count
    twice = torch.arange(count).repeat(2)
    return Pairs(documents[twice], torch.cat([facts, near_misses]), labels, twice)


def ask_one(documents: Tensor, facts: Tensor, near_misses: Tensor, labels: Tensor) -> Pairs:
    """Ask every document once, so that pairs are independent trials.

    Args:
        documents, facts, near_misses: vectors, (N, D).
        labels: whether the fact is asked for, or the near miss, bool (N,).
    """
    questions = torch.where(labels[:, None], facts, near_misses)
    return Pairs(documents, questions, labels, torch.arange(len(documents)))


def pair_features(documents: Tensor, questions: Tensor) -> Tensor:
    """``[d, q, d * q, |d - q|]``, (N, 4D).

    Args:
        documents, questions: centred vectors, (N, D).

    >>> pair_features(torch.tensor([[1.0, -2.0]]), torch.tensor([[3.0, 1.0]])).tolist()
    [[1.0, -2.0, 3.0, 1.0, 3.0, -2.0, 2.0, 3.0]]
    """
    return torch.cat([documents, questions, documents * questions, (documents - questions).abs()], 1)


class PairProbe:
    """Logistic regression on the features of pairs, fitted until it converges.

    Documents and questions are first standardised each by what they were in the fit: only the products of centred
    values say that two things go together. The strength of the fit is the one that predicts held-out documents best.

    Args:
        pairs: to fit on.
        max_steps: of the solver.

    Attributes:
        strength: chosen out of `STRENGTHS`.
        steps: that the solver took.
        converged: whether it was through before ``max_steps``.

    Raises:
        ValueError: scikit-learn is not installed.
    """

    def __init__(self, pairs: Pairs, max_steps: int = MAX_STEPS) -> None:
        self._places = [_place_and_scale(vectors) for vectors in (pairs.documents, pairs.questions)]
        features = self._features(pairs)
        held_out = pairs.groups % _HELD_OUT == _HELD_OUT - 1
        losses = {}
        for strength in STRENGTHS:
            probe = fit_classifier(features[~held_out], _words(pairs.labels[~held_out]), max_steps, strength)
            losses[strength] = _log_loss(probe, features[held_out], pairs.labels[held_out])
        self.strength = min(losses, key=lambda strength: losses[strength])
        self._probe = fit_classifier(features, _words(pairs.labels), max_steps, self.strength)
        self.steps = int(self._probe[-1].n_iter_.max())
        self.converged = self.steps < max_steps

    def correct(self, pairs: Pairs) -> Tensor:
        """Which pairs it answers rightly, bool (N,)."""
        answers = self._probe.predict(self._features(pairs).numpy())
        return torch.from_numpy(answers == "yes") == pairs.labels

    def _features(self, pairs: Pairs) -> Tensor:
        vectors = (pairs.documents, pairs.questions)
        return pair_features(*((v.double() - m) / s for v, (m, s) in zip(vectors, self._places, strict=True)))


def _place_and_scale(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each dimension in float64; one that never varies keeps its scale."""
    vectors = vectors.double()
    deviation = vectors.std(0, correction=0)
    return vectors.mean(0), deviation.where(deviation > 1e-12 * vectors.abs().amax(0), 1.0)


def _words(labels: Tensor) -> Sequence[str]:
    return ["yes" if label else "no" for label in labels.tolist()]


def _log_loss(probe: Pipeline, features: Tensor, labels: Tensor) -> float:
    """Mean loss in nats."""
    log_chances = torch.from_numpy(probe.decision_function(features.numpy()))
    return float(torch.nn.functional.binary_cross_entropy_with_logits(log_chances, labels.to(log_chances.dtype)))
