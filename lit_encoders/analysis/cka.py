"""Centred kernel alignment: how alike two models see the same texts, layer by layer.

Sources: linear CKA, Kornblith et al. (2019), arXiv:1905.00414; the unbiased estimator, Song et al. (2012), JMLR 13;
the use here, Touchent, de la Clergerie (2026), arXiv:2605.12438: features of 500 texts, means over tokens, distance
``1 - CKA``, beside a control of two runs that differ in their seed alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# The unbiased estimator divides by n - 3.
LEAST_TEXTS = 4


@dataclass(frozen=True)
class Form:
    """How CKA is computed.

    Attributes:
        debiased: with the unbiased estimator of HSIC, which is 0 on average for features that have nothing to do with
            each other; the plain one grows with the number of features over that of texts.
        standardised: each feature divided by its deviation first, so that a few large ones do not decide alone.
    """

    debiased: bool = False
    standardised: bool = False


# The first is the paper's.
FORMS: Mapping[str, Form] = {
    "plain": Form(),
    "debiased": Form(debiased=True),
    "standardised": Form(standardised=True),
    "debiased, standardised": Form(debiased=True, standardised=True),
}


def gram(features: Tensor, standardised: bool = False) -> Tensor:
    """Inner products of texts over column-centred features.

    Args:
        features: (N, D), any floating type.
        standardised: divide each feature by its deviation; one that never varies stays 0.

    Returns:
        float64 (N, N).

    >>> gram(torch.tensor([[0.0, 5.0], [2.0, 5.0]])).tolist()
    [[1.0, -1.0], [-1.0, 1.0]]
    """
    centred = features.double() - features.double().mean(0)
    if standardised:
        deviation = centred.square().mean(0).sqrt()
        # What rounding leaves of a constant is no variation.
        constant = deviation <= torch.finfo(torch.float64).eps * features.double().abs().amax(0) * len(features)
        centred = torch.where(constant, 0.0, centred / deviation.where(~constant, 1.0))
    return centred @ centred.T


def hsic(one: Tensor, other: Tensor, debiased: bool = False) -> Tensor:
    """How much two Gram matrices vary together, up to a factor that is the same for all matrices of a size.

    Args:
        one, other: centred Gram matrices, float64 (..., N, N); leading dimensions are broadcast.
        debiased: the unbiased estimator; it may be below 0.

    Returns:
        float64 (...).
    """
    if not debiased:
        return (one * other).sum((-2, -1))
    n = one.shape[-1]
    one, other = (_without_diagonal(matrix) for matrix in (one, other))
    sums = one.sum(-1), other.sum(-1)
    totals = sums[0].sum(-1) * sums[1].sum(-1) / ((n - 1) * (n - 2))
    return (one * other).sum((-2, -1)) + totals - 2 / (n - 2) * (sums[0] * sums[1]).sum(-1)


def _without_diagonal(matrix: Tensor) -> Tensor:
    return matrix - torch.diag_embed(matrix.diagonal(dim1=-2, dim2=-1))


def cka_of_grams(one: Tensor, other: Tensor, debiased: bool = False) -> Tensor:
    """CKA of Gram matrices, ``HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L))``.

    Args:
        one, other, debiased: see `hsic`.

    Returns:
        float64 (...); 1 for features that differ by a rotation and a factor, NaN where one side never varies.
    """
    own = hsic(one, one, debiased) * hsic(other, other, debiased)
    return torch.where(own > 0, hsic(one, other, debiased) / own.clamp_min(0).sqrt(), torch.nan)


def linear_cka(one: Tensor, other: Tensor, form: Form = FORMS["plain"]) -> float:
    """Linear CKA of two sets of features of the same texts, in float64.

    Args:
        one: features, (N, D).
        other: features of the same texts in the same order, (N, E).
        form: see `Form`.

    Raises:
        ValueError: the numbers of texts differ, or are fewer than the estimator needs.

    >>> features = torch.tensor([[1.0, 2.0], [0.0, 1.0], [3.0, -1.0], [2.0, 2.0], [1.0, 5.0]])
    >>> round(linear_cka(features, 3 * features.flip(1)), 12)
    1.0
    """
    check_texts(one, other)
    grams = [gram(features, form.standardised) for features in (one, other)]
    return float(cka_of_grams(grams[0], grams[1], form.debiased))


def check_texts(one: Tensor, other: Tensor) -> None:
    """Refuse features that are not those of the same texts, or of too few; texts are the last dimension but one."""
    counts = [features.shape[-2] for features in (one, other)]
    if counts[0] != counts[1]:
        raise ValueError(f"CKA must be asked of the same texts on both sides, got {counts[0]} and {counts[1]}")
    if counts[0] < LEAST_TEXTS:
        raise ValueError(f"CKA must have at least {LEAST_TEXTS} texts, got {counts[0]}")


def cka_of_layers(one: Tensor, other: Tensor, form: Form = FORMS["plain"]) -> Tensor:
    """CKA of every layer of one model with every layer of another.

    Args:
        one: features of the same texts by layer, (L, N, D).
        other: (M, N, E).
        form: see `Form`.

    Returns:
        float64 (L, M); where L is M, the diagonal is layer by layer.

    Raises:
        ValueError: as `linear_cka`.
    """
    check_texts(one, other)
    rows = [gram(layer, form.standardised) for layer in one]
    columns = torch.stack([gram(layer, form.standardised) for layer in other])
    return torch.stack([cka_of_grams(row, columns, form.debiased) for row in rows])


@dataclass(frozen=True)
class LayerDistance:
    """How far two models are apart in a layer, by one form.

    Attributes:
        layer: number, from 0.
        form: a name of `FORMS`.
        distance: ``1 - CKA`` of the two models.
        control: ``1 - CKA`` of two runs that differ in their seed alone; None without such.
    """

    layer: int
    form: str
    distance: float
    control: float | None

    @property
    def ratio(self) -> float | None:
        """How many times farther than seeds alone: the number to go by; None without a control, or one above 0."""
        return self.distance / self.control if self.control is not None and self.control > 0 else None


def known(value: float | None) -> float | None:
    """A number for files and tables: None for what is none, such as the CKA of a layer that never varies.

    >>> known(0.5), known(math.nan), known(None)
    (0.5, None, None)
    """
    return value if value is not None and math.isfinite(value) else None


def layer_distances(
    one: Tensor, other: Tensor, control: Tensor | None = None, forms: Sequence[str] = tuple(FORMS)
) -> list[LayerDistance]:
    """Distances of two models of one depth, layer by layer, by each form.

    Args:
        one: features of the same texts by layer, (L, N, D).
        other: (L, N, E).
        control: of a model that differs from ``other`` in its seed alone, (L, N, E).
        forms: names of `FORMS`.

    Raises:
        ValueError: the depths differ, or as `linear_cka`.
    """
    depths = {len(features) for features in (one, other, control) if features is not None}
    if len(depths) > 1:
        raise ValueError(f"models must have one number of layers to be compared layer by layer, got {sorted(depths)}")
    found = []
    for name in forms:
        form = FORMS[name]
        for layer in range(len(one)):
            distance = 1 - linear_cka(one[layer], other[layer], form)
            seeds = None if control is None else 1 - linear_cka(other[layer], control[layer], form)
            found.append(LayerDistance(layer, name, distance, seeds))
    return found
