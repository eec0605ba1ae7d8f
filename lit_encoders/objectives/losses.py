"""Decoder, cross-entropy and distillation over target rows, in chunks: no (rows x vocabulary) tensor ever exists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function

CHUNK_ROWS = 512
Direction = Literal["forward", "reverse"]
_Rows = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Teacher:
    """What a teacher says of the target rows, short of its logits.

    Attributes:
        hidden: output of its head for each target, (K, E).
        weight: its decoder matrix, (U, E). Of U and the student's V, the smaller number of tokens is compared, each
            distribution renormalised over it.
        bias: its decoder bias, (U,), or None.
        temperature: both logits are divided by it, above 0; the loss is multiplied by its square, so that gradients
            keep their size (Hinton, Vinyals, Dean 2015, arXiv:1503.02531).
        direction: "forward" is KL(teacher, student), "reverse" KL(student, teacher).
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    temperature: float = 1.0
    direction: Direction = "forward"


def distillation_rows(logits: Tensor, teacher_logits: Tensor, temperature: float, direction: Direction) -> _Rows:
    """KL divergence of each row times the squared temperature, and its gradient for the student's logits.

    Args:
        logits: the student's, (K, V).
        teacher_logits: over the same tokens, (K, V).
        temperature: above 0.
        direction: see `Teacher`.

    Returns:
        Losses in nats, (K,), and gradients, (K, V).

    >>> student, teacher = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()
    >>> [round(distillation_rows(student, teacher, 1.0, way)[0].item(), 4) for way in ("forward", "reverse")]
    [0.3681, 0.5108]
    """
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    log_q = torch.log_softmax(teacher_logits / temperature, dim=-1)
    # In place: each tensor of this size counts, where the vocabulary is large.
    if direction == "forward":
        q = log_q.exp()
        losses = log_q.sub_(log_p).mul_(q).sum(-1)
        gradient = log_p.exp_().sub_(q)
    else:
        p = log_p.exp()
        ratio = log_p.sub_(log_q)
        losses = torch.mul(p, ratio, out=log_q).sum(-1)
        gradient = ratio.sub_(losses[:, None]).mul_(p)
    # T^2 of the definition; its derivative has one T less.
    return losses * temperature**2, gradient.mul_(temperature)


class _ChunkedTargetLoss(Function):
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
        teacher: Teacher | None,
        kd_weight: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
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
            kd_losses = torch.zeros_like(row_losses)
            for start in range(0, len(labels), chunk_rows):
                rows = slice(start, start + chunk_rows)
                x, y = hidden[rows].to(dtype), labels[rows, None]
                logits = torch.nn.functional.linear(x, weight_, bias_)
                if teacher is not None:
                    # Before the softmax below, and dropped at once: fewer tensors of this size stand at a time.
                    theirs = _teacher_logits(teacher, rows, dtype).to(wide)
                    common = min(theirs.shape[1], logits.shape[1])
                    kd_losses[rows], kd_grad = distillation_rows(
                        logits[:, :common].to(wide), theirs[:, :common], teacher.temperature, teacher.direction
                    )
                    del theirs
                # One fused pass; logsumexp, subtraction and exponential apart would each go through memory.
                log_p = torch.log_softmax(logits, dim=-1, dtype=wide)
                del logits
                losses = -log_p.gather(1, y)
                row_losses[rows] = losses[:, 0]
                if not (need_hidden or need_weight or need_bias):
                    continue
                logits_grad = log_p.exp_()
                logits_grad.scatter_add_(1, y, -torch.ones_like(losses))
                if teacher is not None:
                    logits_grad *= 1.0 - kd_weight
                    logits_grad[:, :common] += kd_grad.mul_(kd_weight)
                    del kd_grad
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
        ctx.mark_non_differentiable(row_losses, kd_losses)
        each = row_losses if teacher is None else (1.0 - kd_weight) * row_losses + kd_weight * kd_losses
        total = each.sum() if row_weights is None else (each * row_weights).sum()
        return total, row_losses, kd_losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad, bias_grad = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        return (
            None if hidden_grad is None else hidden_grad * grad.to(hidden_grad.dtype),
            None if weight_grad is None else (weight_grad * grad).to(weight_dtype),
            None if bias_grad is None else (bias_grad * grad).to(bias_dtype),
            *[None] * 5,
        )


def _teacher_logits(teacher: Teacher, rows: slice, dtype: torch.dtype) -> Tensor:
    bias = None if teacher.bias is None else teacher.bias.to(dtype)
    return torch.nn.functional.linear(teacher.hidden[rows].to(dtype), teacher.weight.to(dtype), bias)


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
    total, row_losses, _ = _ChunkedTargetLoss.apply(hidden, weight, bias, labels, row_weights, chunk_rows, None, 0.0)
    return total, row_losses


def chunked_distillation(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    teacher: Teacher,
    kd_weight: float,
    row_weights: Tensor | None = None,
    chunk_rows: int = CHUNK_ROWS,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum ``(1 - kd_weight) * cross-entropy + kd_weight * T^2 KL`` over targets, without holding anyone's logits.

    Args:
        hidden, weight, bias, labels, row_weights, chunk_rows: as in `chunked_cross_entropy`.
        teacher: what it says of the same targets; no gradient goes there.
        kd_weight: share of the divergence, in [0, 1].

    Returns:
        The (weighted) sum in nats with gradients; each target's cross-entropy, (K,); and each target's divergence
        times T squared, (K,); the two without gradients.

    >>> hidden, weight, labels = torch.zeros(3, 2), torch.zeros(4, 2), torch.tensor([0, 1, 3])
    >>> chunked_distillation(hidden, weight, None, labels, Teacher(hidden, weight, None), kd_weight=1.0)[0].item()
    0.0
    """
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows must be at least 1, got {chunk_rows}")
    if not teacher.temperature > 0:
        raise ValueError(f"temperature must be above 0, got {teacher.temperature}")
    if not 0 <= kd_weight <= 1:
        raise ValueError(f"kd_weight must be in [0, 1], got {kd_weight}")
    total, row_losses, kd_losses = _ChunkedTargetLoss.apply(
        hidden, weight, bias, labels, row_weights, chunk_rows, teacher, kd_weight
    )
    return total, row_losses, kd_losses
