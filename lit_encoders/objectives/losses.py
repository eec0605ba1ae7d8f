"""Decoder and cross-entropy over target rows, in chunks, so that no (rows x vocabulary) tensor ever exists."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

CHUNK_ROWS = 512


class _ChunkedCrossEntropy(Function):
    """Takes the gradient in its forward, chunk by chunk, while the chunk's logits are at hand."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        row_weights: Tensor | None,
        chunk_rows: int,
    ) -> tuple[Tensor, Tensor]:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        # Sums are taken in float32 at least, whatever the matrix products run in.
        wide = torch.promote_types(dtype, torch.float32)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]

        with torch.autocast(device, enabled=False):
            weight_, bias_ = weight.to(dtype), None if bias is None else bias.to(dtype)
            hidden_grad = torch.empty_like(hidden) if need_hidden else None
            weight_grad = torch.zeros_like(weight, dtype=wide) if need_weight else None
            bias_grad = torch.zeros_like(bias, dtype=wide) if need_bias and bias is not None else None
            row_losses = torch.empty(len(labels), dtype=wide, device=hidden.device)
            for start in range(0, len(labels), chunk_rows):
                rows = slice(start, start + chunk_rows)
                x, y = hidden[rows].to(dtype), labels[rows, None]
                # One fused pass; logsumexp, subtraction and exponential apart would each go through memory.
                log_p = torch.log_softmax(torch.nn.functional.linear(x, weight_, bias_), dim=-1, dtype=wide)
                losses = -log_p.gather(1, y)
                row_losses[rows] = losses[:, 0]
                if not (need_hidden or need_weight or need_bias):
                    continue
                logits_grad = log_p.exp_()
                logits_grad.scatter_add_(1, y, -torch.ones_like(losses))
                if row_weights is not None:
                    logits_grad *= row_weights[rows, None]
                if bias_grad is not None:
                    bias_grad += logits_grad.sum(0)
                logits_grad = logits_grad.to(dtype)
                if hidden_grad is not None:
                    hidden_grad[rows] = (logits_grad @ weight_).to(hidden.dtype)
                if weight_grad is not None:
                    if dtype == wide:
                        weight_grad.addmm_(logits_grad.T, x)
                    else:
                        weight_grad += logits_grad.T @ x

        ctx.save_for_backward(hidden_grad, weight_grad, bias_grad)
        ctx.dtypes = (weight.dtype, None if bias is None else bias.dtype)
        ctx.mark_non_differentiable(row_losses)
        total = row_losses.sum() if row_weights is None else (row_losses * row_weights).sum()
        return total, row_losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad, bias_grad = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        return (
            None if hidden_grad is None else hidden_grad * grad.to(hidden_grad.dtype),
            None if weight_grad is None else (weight_grad * grad).to(weight_dtype),
            None if bias_grad is None else (bias_grad * grad).to(bias_dtype),
            None,
            None,
            None,
        )


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    row_weights: Tensor | None = None,
    chunk_rows: int = CHUNK_ROWS,
) -> tuple[Tensor, Tensor]:
    """Sum the cross-entropy of ``hidden @ weight.T + bias`` against labels, without holding all logits.

    Args:
        hidden: output of the head for each target, (K, D).
        weight: decoder matrix, (V, D).
        bias: decoder bias, (V,), or None.
        labels: target ids, int64 (K,).
        row_weights: weight of each target in the sum, (K,); 1 where None.
        chunk_rows: targets taken at a time.

    Returns:
        The (weighted) sum in nats, a scalar with gradients to ``hidden``, ``weight`` and ``bias``; and each target's
        own loss in nats, (K,), without gradients. Both at least float32. No target gives 0 and zero gradients.

    >>> total, rows = chunked_cross_entropy(torch.zeros(3, 2), torch.zeros(4, 2), None, torch.tensor([0, 1, 3]))
    >>> round(total.item(), 4), rows.shape
    (4.1589, torch.Size([3]))
    """
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows must be at least 1, got {chunk_rows}")
    total, row_losses = _ChunkedCrossEntropy.apply(hidden, weight, bias, labels, row_weights, chunk_rows)
    return total, row_losses
