"""The chunked loss against plain cross-entropy."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from torch.utils._python_dispatch import TorchDispatchMode

from lit_encoders.objectives.losses import chunked_cross_entropy

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
