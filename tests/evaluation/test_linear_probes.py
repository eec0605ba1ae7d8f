"""Linear probes: scikit-learn by hand, and the projection's steps by hand in float64."""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from lit_encoders.evaluation.linear_probes import fit_classifier, fit_projection
from lit_encoders.evaluation.ranking import top_documents

Array = npt.NDArray[np.float64]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# Classes


def test_classifier_finds_separable_classes() -> None:
    labels = ["a", "b", "c"] * 40
    centres = 6 * torch.eye(3, 8)
    points = draw(120, 8) + centres.repeat(40, 1)
    probe = fit_classifier(points[:60], labels[:60])
    assert probe.score(points[60:].numpy(), labels[60:]) == 1.0
    assert list(probe.predict(centres.numpy())) == ["a", "b", "c"]


@pytest.mark.parametrize("strength", [1.0, 0.01])
def test_classifier_is_a_logistic_regression_on_standardised_columns(strength: float) -> None:
    from sklearn.linear_model import LogisticRegression

    # Columns of very different sizes and places: without standardising, other probabilities come out.
    scale, shift = torch.logspace(-2, 2, 6), 10 * draw(6, seed=2)
    points = (draw(80, 6) * scale + shift).double()
    labels = [("x", "y", "z")[int(number)] for number in draw(80, seed=1).mul(3).abs().remainder(3)]
    mean, spread = points[:60].mean(0), points[:60].std(0, correction=0)
    standardised = ((points - mean) / spread).numpy()
    by_hand = LogisticRegression(C=strength, max_iter=1000).fit(standardised[:60], labels[:60])
    found = fit_classifier(points[:60], labels[:60], strength=strength)
    assert list(found.classes_) == ["x", "y", "z"]
    np.testing.assert_allclose(
        found.predict_proba(points[60:].numpy()), by_hand.predict_proba(standardised[60:]), atol=1e-5
    )


def test_classifier_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    with pytest.raises(ValueError, match=r"^a classifier needs scikit-learn: pip install scikit-learn$"):
        fit_classifier(draw(4, 2), ["a", "b"] * 2)


# Matches


def loss_and_gradient(queries: Array, documents: Array, matrix: Array, temperature: float) -> tuple[float, Array]:
    """The loss with in-batch negatives, and its gradient by the chain rule."""
    count = len(queries)
    left, right = queries @ matrix, documents @ matrix
    sizes = [np.linalg.norm(side, axis=1, keepdims=True) for side in (left, right)]
    left, right = left / sizes[0], right / sizes[1]
    powers = np.exp(left @ right.T / temperature)
    rows, columns = powers / powers.sum(1, keepdims=True), powers / powers.sum(0)
    loss = -(np.log(np.diag(rows)).mean() + np.log(np.diag(columns)).mean()) / 2
    of_scores = (rows + columns - 2 * np.eye(count)) / (2 * count * temperature)
    gradient = np.zeros_like(matrix)
    for inputs, unit, size, outer in (
        (queries, left, sizes[0], of_scores @ right),
        (documents, right, sizes[1], of_scores.T @ left),
    ):
        gradient += inputs.T @ ((outer - unit * (outer * unit).sum(1, keepdims=True)) / size)
    return float(loss), gradient


def adam_by_hand(queries: Tensor, documents: Tensor, steps: int, rate: float, temperature: float) -> Array:
    """Kingma, Ba (2015), algorithm 1, with a rate that falls to 0 as a line."""
    matrix = np.eye(queries.shape[1])
    first, second = np.zeros_like(matrix), np.zeros_like(matrix)
    for step in range(steps):
        _, gradient = loss_and_gradient(queries.double().numpy(), documents.double().numpy(), matrix, temperature)
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        mean, square = first / (1 - 0.9 ** (step + 1)), second / (1 - 0.999 ** (step + 1))
        matrix = matrix - rate * (1 - step / steps) * mean / (np.sqrt(square) + 1e-8)
    return matrix


def test_gradient_by_hand_is_that_of_differences() -> None:
    queries, documents, matrix = (draw(*shape).double().numpy() for shape in ((6, 4), (6, 4), (4, 4)))
    _, gradient = loss_and_gradient(queries, documents, matrix, 0.2)
    for place in ((0, 0), (1, 3), (3, 2)):
        nudge = np.zeros((4, 4))
        nudge[place] = 1e-6
        up, down = (loss_and_gradient(queries, documents, matrix + sign * nudge, 0.2)[0] for sign in (1, -1))
        assert gradient[place] == pytest.approx((up - down) / 2e-6, rel=1e-5)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_steps_are_those_of_adam_by_hand(steps: int) -> None:
    """Of two steps and more the sizes of gradients show, not their signs alone."""
    queries, documents = draw(12, 5), draw(12, 5, seed=1)
    found = fit_projection(queries, documents, steps=steps, learning_rate=0.05, temperature=0.2)
    expected = adam_by_hand(queries, documents, steps, 0.05, 0.2)
    np.testing.assert_allclose(found.double().numpy(), expected, atol=2e-5)
    assert np.abs(expected - np.eye(5)).max() > 0.04


def test_no_steps_are_the_identity() -> None:
    found = fit_projection(draw(9, 5), draw(9, 5, seed=1), steps=0)
    assert torch.equal(found, torch.eye(5))
    assert not found.requires_grad


def test_a_step_draws_its_pairs_by_the_seed() -> None:
    """Queries stay with their documents, and nothing else of the text is looked at."""
    queries, documents = draw(12, 5), draw(12, 5, seed=1)
    drawn = torch.randperm(12, generator=torch.Generator().manual_seed(3))[:4]
    found = fit_projection(queries, documents, steps=1, batch=4, seed=3)
    torch.testing.assert_close(found, fit_projection(queries[drawn], documents[drawn], steps=1))
    rest = torch.ones(12, dtype=torch.bool)
    rest[drawn] = False
    queries[rest] = float("nan")
    assert torch.equal(fit_projection(queries, documents, steps=1, batch=4, seed=3), found)


def found_first(queries: torch.Tensor, documents: torch.Tensor) -> float:
    """Share of queries whose own document is the closest."""
    own = [[place] for place in range(len(queries))]
    return sum(top_documents(queries, documents, 1, own)[place][0] == place for place in range(len(queries))) / len(own)


def test_projection_undoes_a_known_distortion() -> None:
    """What a pair shares stands in few directions, drowned in noise of either; both are mixed by one linear map."""
    shared, dims, pairs = 6, 24, 600
    mixing = torch.linalg.qr(draw(dims, dims, seed=9))[0]
    content = draw(pairs, shared)
    queries, documents = (
        torch.cat([content, 3 * draw(pairs, dims - shared, seed=seed)], dim=1) @ mixing for seed in (1, 2)
    )
    fit, test = slice(0, 400), slice(400, pairs)
    matrix = fit_projection(queries[fit], documents[fit], steps=100, learning_rate=2e-2)
    before = found_first(queries[test], documents[test])
    after = found_first(queries[test] @ matrix, documents[test] @ matrix)
    known = mixing.T @ torch.diag(torch.cat([torch.ones(shared), torch.zeros(dims - shared)]))
    assert before < 0.1
    assert after > 0.9
    assert found_first(queries[test] @ known, documents[test] @ known) == 1.0


def test_seed_decides_and_the_global_state_rests() -> None:
    queries, documents = draw(12, 5), draw(12, 5, seed=1)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    one = fit_projection(queries, documents, steps=5, batch=4)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(fit_projection(queries, documents, steps=5, batch=4), one)
    assert not torch.equal(fit_projection(queries, documents, steps=5, batch=4, seed=1), one)
