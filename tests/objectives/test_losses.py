"""The chunked loss against plain cross-entropy."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, linear
from torch.utils._python_dispatch import TorchDispatchMode

from lit_encoders.objectives.losses import Teacher, chunked_cross_entropy, chunked_distillation, distillation_rows

ROWS, WIDTH, VOCAB = 23, 8, 50


def problem(
    rows: int = ROWS, dtype: torch.dtype = torch.float64, bias: bool = True
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    draw = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()

    hidden, weight, offset = leaf(rows, WIDTH), leaf(VOCAB, WIDTH), leaf(VOCAB) if bias else None
    return hidden, weight, offset, torch.randint(0, VOCAB, (rows,), generator=draw)


def gradients(total: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    return list(torch.autograd.grad(total, [x for x in tensors if x is not None]))


@pytest.mark.parametrize("chunk_rows", [1, 7, 512])
@pytest.mark.parametrize("bias", [True, False])
def test_value_and_gradients_equal_plain_cross_entropy(chunk_rows: int, bias: bool) -> None:
    hidden, weight, offset, labels = problem(bias=bias)
    total, row_losses = chunked_cross_entropy(hidden, weight, offset, labels, chunk_rows=chunk_rows)
    plain = cross_entropy(linear(hidden, weight, offset), labels, reduction="none")
    torch.testing.assert_close(total, plain.sum(), rtol=1e-12, atol=0)
    torch.testing.assert_close(row_losses, plain.detach(), rtol=1e-12, atol=1e-12)
    ours = gradients(3 * total, hidden, weight, offset)
    theirs = gradients(3 * plain.sum(), hidden, weight, offset)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk_rows", [7, 512])
def test_row_weights_weigh_the_sum_but_not_the_rows(chunk_rows: int) -> None:
    hidden, weight, bias, labels = problem()
    row_weights = torch.rand(ROWS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    row_weights[3] = 0
    total, row_losses = chunked_cross_entropy(hidden, weight, bias, labels, row_weights, chunk_rows)
    plain = cross_entropy(linear(hidden, weight, bias), labels, reduction="none")
    torch.testing.assert_close(row_losses, plain.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(total, (plain * row_weights).sum(), rtol=1e-12, atol=0)
    ours = gradients(total, hidden, weight, bias)
    theirs = gradients((plain * row_weights).sum(), hidden, weight, bias)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_m01_no_target_gives_zero_and_zero_gradients() -> None:
    hidden, weight, bias, labels = problem(rows=0)
    total, row_losses = chunked_cross_entropy(hidden, weight, bias, labels)
    assert total.item() == 0
    assert row_losses.shape == (0,)
    for grad, tensor in zip(gradients(total, hidden, weight, bias), (hidden, weight, bias), strict=True):
        assert torch.equal(grad, torch.zeros_like(tensor))


def test_row_losses_carry_no_gradient() -> None:
    hidden, weight, bias, labels = problem()
    assert not chunked_cross_entropy(hidden, weight, bias, labels)[1].requires_grad


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
def test_gradient_only_where_asked(wanted: tuple[bool, bool, bool]) -> None:
    *tensors, labels = problem()
    for tensor, asked in zip(tensors, wanted, strict=True):
        tensor.requires_grad_(asked)
    total, _ = chunked_cross_entropy(*tensors, labels)
    total.backward()
    assert tuple(tensor.grad is not None for tensor in tensors) == wanted
    plain = cross_entropy(linear(*tensors), labels, reduction="sum")
    asked_for = tensors[wanted.index(True)]
    torch.testing.assert_close(asked_for.grad, torch.autograd.grad(plain, asked_for)[0], rtol=1e-12, atol=1e-12)


def test_no_graph_without_gradients() -> None:
    hidden, weight, bias, labels = problem()
    with torch.no_grad():
        total, _ = chunked_cross_entropy(hidden, weight, bias, labels)
    assert not total.requires_grad
    torch.testing.assert_close(total, cross_entropy(linear(hidden, weight, bias), labels, reduction="sum"))


@contextmanager
def largest_result() -> Iterator[dict[str, int]]:
    """Record the number of elements of the largest tensor that any operation returns."""
    seen = {"numel": 0}

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for value in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(value, Tensor):
                    seen["numel"] = max(seen["numel"], value.numel())
            return out

    with Record():
        yield seen


def test_no_tensor_holds_the_logits_of_more_rows_than_a_chunk() -> None:
    rows, chunk = 200, 8
    hidden, weight, bias, labels = problem(rows=rows, dtype=torch.float32)
    with largest_result() as seen:
        chunked_cross_entropy(hidden, weight, bias, labels, chunk_rows=chunk)[0].backward()
    assert seen["numel"] == rows * WIDTH  # The gradient of ``hidden``; a chunk's logits are 400, all logits 10,000.
    with largest_result() as seen:
        cross_entropy(linear(hidden, weight, bias), labels, reduction="sum").backward()
    assert seen["numel"] == rows * VOCAB


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_are_float32_at_least(dtype: torch.dtype) -> None:
    hidden, weight, bias, labels = problem(dtype=dtype)
    total, row_losses = chunked_cross_entropy(hidden, weight, bias, labels)
    assert total.dtype == row_losses.dtype == torch.float32
    exact = cross_entropy(linear(hidden.double(), weight.double(), bias.double()), labels, reduction="sum")
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    assert total.item() == pytest.approx(exact.item(), rel=tolerance)
    for grad, tensor in zip(gradients(total, hidden, weight, bias), (hidden, weight, bias), strict=True):
        assert grad.dtype == tensor.dtype


def test_many_bfloat16_chunks_add_up_without_losing_small_ones() -> None:
    """A bfloat16 sum of 4,000 equal terms stops growing at 256 of them."""
    rows = 4000
    hidden = torch.zeros(rows, WIDTH, dtype=torch.bfloat16)
    weight, bias = torch.zeros(VOCAB, WIDTH, dtype=torch.bfloat16), torch.zeros(VOCAB, requires_grad=True)
    total, _ = chunked_cross_entropy(hidden, weight, bias, torch.zeros(rows, dtype=torch.int64), chunk_rows=1)
    assert total.item() == pytest.approx(rows * torch.tensor(VOCAB).log().item(), rel=1e-5)
    total.backward()
    assert bias.grad[0].item() == pytest.approx(rows * (1 / VOCAB - 1), rel=1e-4)


def test_under_autocast_products_are_bfloat16_and_gradients_float32() -> None:
    hidden, weight, bias, labels = problem(dtype=torch.float32)
    exact = cross_entropy(linear(hidden, weight, bias), labels, reduction="sum")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total, _ = chunked_cross_entropy(hidden, weight, bias, labels, chunk_rows=7)
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(exact.item(), rel=1e-2)
    assert total.item() != exact.item()
    for one, other in zip(gradients(total, hidden, weight, bias), gradients(exact, hidden, weight, bias), strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=0, atol=0.02 * other.abs().max().item())


def test_tied_weight_collects_both_gradients() -> None:
    """Embedding and decoder are one tensor in most encoders."""
    weight = torch.randn(VOCAB, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    weight.requires_grad_()
    labels = torch.arange(5)
    total, _ = chunked_cross_entropy(weight[10:15].tanh(), weight, None, labels)
    plain = cross_entropy(weight[10:15].tanh() @ weight.T, labels, reduction="sum")
    torch.testing.assert_close(gradients(total, weight), gradients(plain, weight), rtol=1e-12, atol=1e-12)


def test_chunk_must_hold_a_row() -> None:
    hidden, weight, bias, labels = problem()
    with pytest.raises(ValueError, match="chunk_rows must be at least 1, got 0"):
        chunked_cross_entropy(hidden, weight, bias, labels, chunk_rows=0)


# Distillation: D01, D02, D04, D09.

Way = Literal["forward", "reverse"]


def taught(rows: int = ROWS, dtype: torch.dtype = torch.float64, vocab: int = VOCAB, **settings: Any) -> Teacher:
    """A teacher of another width."""
    draw = torch.Generator().manual_seed(5)
    hidden, weight, bias = (
        torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)
        for shape in ((rows, 3), (vocab, 3), (vocab,))
    )
    return Teacher(hidden, weight, bias, **settings)


def plain_divergence(student: Tensor, teacher: Tensor, temperature: float, direction: Way) -> Tensor:
    """Of each row by torch's kl_div, whose arguments are (log of the second, log of the first) distribution."""
    p, q = (torch.log_softmax(x / temperature, -1) for x in (student, teacher))
    pair = (p, q) if direction == "forward" else (q, p)
    return kl_div(*pair, reduction="none", log_target=True).sum(-1) * temperature**2


@pytest.mark.parametrize(("direction", "expected"), [("forward", 0.3681), ("reverse", 0.5108)])
def test_d04_direction_by_name(direction: Way, expected: float) -> None:
    """0.9 ln(0.9/0.5) + 0.1 ln(0.1/0.5), and 0.5 ln(0.5/0.9) + 0.5 ln(0.5/0.1)."""
    student, teacher = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()
    assert distillation_rows(student, teacher, 1.0, direction)[0].item() == pytest.approx(expected, abs=5e-5)
    losses, gradient = distillation_rows(teacher + 3.0, teacher, 1.0, direction)
    assert losses.item() == pytest.approx(0.0, abs=1e-7)
    assert gradient.abs().max() < 1e-6


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_rows_and_their_gradient_equal_torch_s_kl_div(direction: Way, temperature: float) -> None:
    draw = torch.Generator().manual_seed(0)
    student, teacher = (3 * torch.randn(10, 7, generator=draw, dtype=torch.float64) for _ in range(2))
    student.requires_grad_()
    losses, gradient = distillation_rows(student.detach(), teacher, temperature, direction)
    plain = plain_divergence(student, teacher, temperature, direction)
    torch.testing.assert_close(losses, plain.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, torch.autograd.grad(plain.sum(), student)[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_temperature_leaves_gradients_their_size(direction: Way) -> None:
    """Logits within 1 of each other: without the factor T^2 the gradient at 8 would be 64 times smaller."""
    draw = torch.Generator().manual_seed(0)
    student, teacher = (torch.rand(10, VOCAB, generator=draw, dtype=torch.float64) for _ in range(2))
    sizes = [distillation_rows(student, teacher, t, direction)[1].norm().item() for t in (1.0, 8.0)]
    assert 0.5 < sizes[1] / sizes[0] < 2


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_d01_d02_mean_over_positions_by_a_loop_in_python(direction: Way) -> None:
    """Logits (2, 5, 7) at T = 2: per position, whatever the vocabulary, and unchanged when repeated."""
    draw = torch.Generator().manual_seed(3)
    student, teacher = (torch.randn(2, 5, 7, generator=draw, dtype=torch.float64) for _ in range(2))
    expected = 0.0
    for mine, theirs in zip(student.flatten(0, 1).tolist(), teacher.flatten(0, 1).tolist(), strict=True):
        p, q = ([math.exp(x / 2) / sum(math.exp(y / 2) for y in row) for x in row] for row in (mine, theirs))
        first, second = (q, p) if direction == "forward" else (p, q)
        expected += 4 * sum(a * math.log(a / b) for a, b in zip(first, second, strict=True)) / 10
    identity, labels = torch.eye(7, dtype=torch.float64), torch.zeros(10, dtype=torch.int64)
    for repeats in (1, 3):
        rows, theirs = (x.flatten(0, 1).repeat(repeats, 1) for x in (student, teacher))
        said = Teacher(theirs, identity, None, 2.0, direction)
        total, _, kd = chunked_distillation(rows, identity, None, labels.repeat(repeats), said, kd_weight=1.0)
        assert total.item() / len(rows) == pytest.approx(expected, rel=1e-12)
        assert kd.mean().item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("chunk_rows", [1, 7, 512])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_chunked_distillation_equals_plain(
    direction: Way, chunk_rows: int, dtype: torch.dtype, tolerance: float
) -> None:
    """Against all logits at once in float64; 1e-6 of the largest value in float32."""
    hidden, weight, bias, labels = problem(dtype=dtype)
    row_weights = torch.rand(ROWS, dtype=dtype, generator=torch.Generator().manual_seed(1))
    teacher = taught(dtype=dtype, temperature=2.0, direction=direction)
    total, rows, kd = chunked_distillation(hidden, weight, bias, labels, teacher, 0.3, row_weights, chunk_rows)
    ours = gradients(2 * total, hidden, weight, bias)

    leaves = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]  # type: ignore[union-attr]
    logits = linear(*leaves)
    theirs = linear(*(x.double() for x in (teacher.hidden, teacher.weight, teacher.bias)))  # type: ignore[union-attr]
    plain, divergence = (
        cross_entropy(logits, labels, reduction="none"),
        plain_divergence(logits, theirs, 2.0, direction),
    )
    expected = (row_weights.double() * (0.7 * plain + 0.3 * divergence)).sum()
    both = zip([total, rows, kd, *ours], [expected, plain, divergence, *gradients(2 * expected, *leaves)], strict=True)
    for mine, right in both:
        torch.testing.assert_close(
            mine.detach().double(), right.detach(), rtol=tolerance, atol=tolerance * right.abs().max().item()
        )


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("larger", ["teacher", "student"])
def test_the_smaller_vocabulary_is_compared_renormalised(direction: Way, larger: str) -> None:
    hidden, weight, bias, labels = problem()
    teacher = taught(vocab=VOCAB + 9 if larger == "teacher" else VOCAB - 9, direction=direction)
    labels = labels.clamp(max=VOCAB - 10)
    total, _, kd = chunked_distillation(hidden, weight, bias, labels, teacher, 0.5, chunk_rows=7)
    common = min(VOCAB, len(teacher.weight))
    logits = linear(hidden, weight, bias)
    theirs = linear(teacher.hidden, teacher.weight, teacher.bias)
    divergence = plain_divergence(logits[:, :common], theirs[:, :common], 1.0, direction)
    expected = 0.5 * cross_entropy(logits, labels, reduction="sum") + 0.5 * divergence.sum()
    torch.testing.assert_close(kd, divergence.detach(), rtol=1e-11, atol=1e-12)
    for mine, right in zip(
        gradients(total, hidden, weight, bias), gradients(expected, hidden, weight, bias), strict=True
    ):
        torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-11)


def test_distillation_under_autocast_takes_its_sums_in_float32() -> None:
    hidden, weight, bias, labels = problem(dtype=torch.float32)
    teacher = taught(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        total, rows, kd = chunked_distillation(hidden, weight, bias, labels, teacher, 0.5)
    assert {x.dtype for x in (total, rows, kd)} == {torch.float32}
    exact = chunked_distillation(hidden, weight, bias, labels, teacher, 0.5)
    assert total.item() == pytest.approx(exact[0].item(), rel=1e-2)
    for mine, right in zip(
        gradients(total, hidden, weight, bias), gradients(exact[0], hidden, weight, bias), strict=True
    ):
        assert mine.dtype == torch.float32
        assert (mine - right).norm() / right.norm() < 2e-2


def test_d09_no_target_gives_zero() -> None:
    hidden, weight, bias, labels = problem(rows=0)
    total, _, kd = chunked_distillation(hidden, weight, bias, labels, taught(rows=0), 0.5)
    assert total.item() == 0
    assert kd.shape == (0,)
    for grad in gradients(total, hidden, weight, bias):
        assert torch.equal(grad, torch.zeros_like(grad))


def test_weight_zero_is_cross_entropy_bit_for_bit() -> None:
    hidden, weight, bias, labels = problem(dtype=torch.float32)
    total, *_ = chunked_distillation(hidden, weight, bias, labels, taught(dtype=torch.float32), 0.0)
    plain, _ = chunked_cross_entropy(hidden, weight, bias, labels)
    assert torch.equal(total, plain)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, "temperature must be above 0, got 0.0"),
        ({"temperature": -1.0}, "temperature must be above 0, got -1.0"),
        ({"kd_weight": 1.5}, r"kd_weight must be in \[0, 1\], got 1.5"),
        ({"chunk_rows": 0}, "chunk_rows must be at least 1, got 0"),
    ],
)
def test_distillation_refuses_values_out_of_range(settings: dict[str, Any], message: str) -> None:
    hidden, weight, bias, labels = problem()
    options = {"kd_weight": 0.5, **settings}
    teacher = taught(temperature=options.pop("temperature", 1.0))
    with pytest.raises(ValueError, match=message):
        chunked_distillation(hidden, weight, bias, labels, teacher, **options)
