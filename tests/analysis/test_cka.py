"""CKA against closed forms and a NumPy reference in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lit_encoders.analysis.cka import FORMS, Form, cka_of_layers, gram, layer_distances, linear_cka


def gaussian(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def numpy_cka(x: np.ndarray, y: np.ndarray, debiased: bool, standardised: bool) -> float:
    """Feature form of the plain estimator, and the unbiased one term by term, as the papers write them."""
    x, y = x - x.mean(0), y - y.mean(0)
    if standardised:
        x, y = x / x.std(0), y / y.std(0)
    if not debiased:
        return float(np.linalg.norm(y.T @ x) ** 2 / (np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y)))

    def unbiased(k: np.ndarray, m: np.ndarray) -> float:
        n = len(k)
        k, m = k - np.diag(np.diag(k)), m - np.diag(np.diag(m))
        ones = np.ones(n)
        second = (ones @ k @ ones) * (ones @ m @ ones) / ((n - 1) * (n - 2))
        third = 2 / (n - 2) * (ones @ k @ m @ ones)
        return float((np.trace(k @ m) + second - third) / (n * (n - 3)))

    k, m = x @ x.T, y @ y.T
    return unbiased(k, m) / math.sqrt(unbiased(k, k) * unbiased(m, m))


@pytest.mark.parametrize("name", FORMS)
def test_equals_a_reference_in_numpy(name: str) -> None:
    form = FORMS[name]
    x = gaussian(60, 17, 0) @ gaussian(17, 17, 1) + 3
    y = torch.cat([x[:, :5] ** 2, gaussian(60, 6, 2)], 1)
    expected = numpy_cka(x.numpy(), y.numpy(), form.debiased, form.standardised)
    assert linear_cka(x, y, form) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("name", FORMS)
def test_identity_is_one(name: str) -> None:
    x = gaussian(40, 8, 0)
    assert linear_cka(x, x, FORMS[name]) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("debiased", [False, True])
def test_rotation_and_scale_do_not_matter(debiased: bool) -> None:
    x = gaussian(40, 8, 0)
    rotation = torch.linalg.qr(gaussian(8, 8, 1))[0]
    assert linear_cka(x, -7 * x @ rotation + 2, Form(debiased)) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("standardised", [False, True])
def test_independent_features_are_at_zero_when_debiased(standardised: bool) -> None:
    x, y = gaussian(500, 384, 0), gaussian(500, 384, 1)
    assert abs(linear_cka(x, y, Form(True, standardised))) < 0.02
    # The plain one is far off with as many features as texts.
    assert linear_cka(x, y, Form(False, standardised)) > 0.3


def test_an_outlier_dimension_decides_the_plain_value_alone() -> None:
    shared = gaussian(300, 1, 0) * 100
    x, y = torch.cat([gaussian(300, 32, 1), shared], 1), torch.cat([gaussian(300, 32, 2), shared], 1)
    for debiased in (False, True):
        assert linear_cka(x, y, Form(debiased)) > 0.99
        assert linear_cka(x, y, Form(debiased, standardised=True)) < 0.3
    # And the other way: alike but for one dimension.
    same = gaussian(300, 32, 3)
    x = torch.cat([same, gaussian(300, 1, 4) * 100], 1)
    y = torch.cat([same, gaussian(300, 1, 5) * 100], 1)
    assert linear_cka(x, y) < 0.1
    assert linear_cka(x, y, FORMS["standardised"]) > 0.9


def test_float32_features_are_computed_in_float64() -> None:
    # A deep layer: large means, small differences.
    x = (gaussian(100, 16, 0) * 1e-3 + 100).float()
    expected = linear_cka(x.double(), x.double().flip(1) ** 2)
    assert linear_cka(x, (x.double().flip(1) ** 2).float()) == pytest.approx(expected, abs=1e-3)
    assert gram(x).dtype == torch.float64


def test_a_constant_feature_is_no_feature() -> None:
    x = gaussian(30, 4, 0)
    padded = torch.cat([x, torch.full((30, 1), 0.1, dtype=torch.float64)], 1)
    for form in FORMS.values():
        assert linear_cka(padded, x, form) == pytest.approx(1, abs=1e-12)
    assert math.isnan(linear_cka(torch.ones(30, 3), x))


def test_layers_against_layers() -> None:
    one, other = gaussian(3 * 20, 5, 0).view(3, 20, 5), gaussian(2 * 20, 4, 1).view(2, 20, 4)
    found = cka_of_layers(one, other, FORMS["debiased"])
    assert found.shape == (3, 2)
    assert found[2, 1] == pytest.approx(linear_cka(one[2], other[1], FORMS["debiased"]), abs=1e-12)


def test_distances_with_their_control() -> None:
    other = gaussian(2 * 50, 6, 0).view(2, 50, 6)
    control = other + 0.1 * gaussian(2 * 50, 6, 1).view(2, 50, 6)
    one = other + 0.5 * gaussian(2 * 50, 6, 2).view(2, 50, 6)
    found = layer_distances(one, other, control, ["plain"])
    assert [item.layer for item in found] == [0, 1]
    for item in found:
        assert item.distance == pytest.approx(1 - linear_cka(one[item.layer], other[item.layer]))
        assert item.control == pytest.approx(1 - linear_cka(control[item.layer], other[item.layer]))
        assert item.ratio == pytest.approx(item.distance / item.control)
        assert item.ratio > 5
    assert layer_distances(one, other, None, ["plain"])[0].ratio is None


def test_what_cannot_be_compared() -> None:
    x = gaussian(10, 3, 0)
    with pytest.raises(ValueError, match="same texts on both sides, got 10 and 9"):
        linear_cka(x, x[:9])
    with pytest.raises(ValueError, match="at least 4 texts, got 3"):
        linear_cka(x[:3], x[:3])
    with pytest.raises(ValueError, match=r"one number of layers .*, got \[1, 2\]"):
        layer_distances(x.expand(2, 10, 3), x[None])
