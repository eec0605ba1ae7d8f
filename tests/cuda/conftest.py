"""Packed attention and whole backbones in bfloat16: their error against float64, in units of plain bfloat16's own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lit_encoders.models.attention import PackLayout, packed_attention
from lit_encoders.models.backbone import Backbone, RowGroup, load_config, load_language_model

# Around the kernels' block sizes of 64 and 128, around the windows, and the shortest.
LENGTHS = [1, 2, 5, 5, 9, 63, 64, 65, 127, 128, 129, 300, 1024]
VOCAB = 512
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 192,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
GROUPED = {"num_key_value_heads": 1, "head_dim": 64}
LAYERS = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
# One of each kind: absolute positions, rotation inside and outside autocast, windows, grouped queries, wide heads.
MODELS: dict[str, dict[str, Any]] = {
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "gemma3_text": {**GROUPED, **LAYERS, "head_dim": 256, "query_pre_attn_scalar": 256},
    "llama": GROUPED,
    "modernbert": {"local_attention": 64, "global_attn_every_n_layers": 2},
    "nomic_bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "attention_dropout": 0.0},
    "qwen3": GROUPED,
}
_worst: dict[str, float] = {}


def largest(difference: Tensor) -> float:
    return float(difference.abs().max())


def formula(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], causal: bool, window: int | None) -> Tensor:
    """Softmax attention document by document in the type of its inputs, (H, T, D) -> (T, H, D)."""
    k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))
    outputs = []
    for q_, k_, v_ in zip(*(x.split(lengths, dim=1) for x in (q, k, v)), strict=True):
        place = torch.arange(q_.shape[1], device=q.device)
        distance = place[:, None] - place
        seen = distance.abs() < (window or len(place))
        if causal:
            seen &= distance >= 0
        scores = (q_ @ k_.mT) * q.shape[-1] ** -0.5
        outputs.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v_)
    return torch.cat(outputs, dim=1).transpose(0, 1)


def with_gradients(attend: Callable[..., Tensor], states: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """Output and gradients to queries, keys and values, in float64."""
    leaves = [x.clone().requires_grad_() for x in states]
    out = attend(*leaves)
    return [x.double() for x in (out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype)))]


@pytest.fixture
def attention_errors() -> Callable[..., tuple[float, float]]:
    def measure(
        device: str,
        backend: Any,
        *,
        causal: bool,
        window: int | None,
        heads: tuple[int, int] = (4, 4),
        width: int = 64,
        lengths: list[int] = LENGTHS,
        reference_window: int | None = None,
    ) -> tuple[float, float]:
        """Errors of a back-end as multiples of plain bfloat16 attention's: of the output and of the gradients."""
        draw = torch.Generator().manual_seed(0)
        shapes = [(count, sum(lengths), width) for count in (heads[0], heads[1], heads[1])]
        states = [torch.randn(shape, generator=draw).to(device, torch.bfloat16) for shape in shapes]
        upstream = torch.randn(sum(lengths), heads[0], width, generator=draw).to(device, torch.bfloat16)
        layout = PackLayout(np.array(lengths), causal=causal, backend=backend, device=device)

        def packed(*qkv: Tensor) -> Tensor:
            q, k, v = (x[None] for x in qkv)
            return packed_attention(nn.Identity(), q, k, v, None, packing=layout, sliding_window=window)[0][0]

        def plain(*qkv: Tensor) -> Tensor:
            return formula(*qkv, lengths, causal, reference_window or window)

        exact = with_gradients(plain, [x.double() for x in states], upstream)
        rough = with_gradients(plain, states, upstream)
        ours = with_gradients(packed, states, upstream)
        # A window of 1 leaves plain attention nothing to round.
        ratios = [largest(a - c) / max(largest(b - c), 1e-3) for a, b, c in zip(ours, rough, exact, strict=True)]
        return ratios[0], max(ratios[1:])

    return measure


def make_backbone(name: str, dtype: torch.dtype) -> Backbone:
    """A model whose weights are bfloat16 numbers whatever their type, so that all types compute the same thing."""
    settings = {"model_type": name, **SHAPE, **MODELS[name]}
    config = load_config(settings)
    torch.manual_seed(0)
    weights = load_language_model(settings, config, torch.float32).bfloat16().state_dict()
    # Built in its type and filled, not converted: conversion would round the frequencies of the rotation too.
    backbone = Backbone(load_language_model(settings, config, dtype)).eval()
    backbone.model.load_state_dict(weights)
    return backbone


def make_ids(lengths: list[int]) -> tuple[Tensor, Tensor]:
    ids = torch.randint(5, VOCAB, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    return ids, torch.cat([torch.arange(length) for length in lengths])


@pytest.fixture
def backbone_errors() -> Callable[..., tuple[float, float]]:
    def measure(
        device: str, backend: Any, name: str, *, causal: bool, mixed: bool, lengths: list[int]
    ) -> tuple[float, float]:
        """Errors of a packed backbone as multiples of the ``sdpa`` back-end's: of the losses and of the gradients.

        ``mixed`` is autocast over float32 weights; without it the weights are bfloat16.
        """
        ids, positions = make_ids(lengths)

        def run(where: str, kernel: Any, dtype: torch.dtype) -> list[Tensor]:
            backbone = make_backbone(name, dtype).to(where)
            layout = PackLayout(np.array(lengths), causal=causal, backend=kernel, device=where)
            x = ids.to(where)
            with torch.autocast(where, torch.bfloat16, enabled=dtype == torch.float32):
                rows = torch.arange(len(x) - 1, device=where)
                total, losses = backbone(x, positions.to(where), layout, [RowGroup(rows, x[1:])])[0][:2]
            total.backward()
            gradients = [p.grad.flatten() for p in backbone.parameters() if p.grad is not None]
            return [losses.double().cpu(), torch.cat(gradients).double().cpu()]

        dtype = torch.float32 if mixed else torch.bfloat16
        exact, rough = run("cpu", "sdpa", torch.float64), run(device, "sdpa", dtype)
        ours = run(device, backend, dtype)
        ratios = [float((a - c).norm() / (b - c).norm()) for a, b, c in zip(ours, rough, exact, strict=True)]
        return ratios[0], ratios[1]

    return measure


@pytest.fixture
def plain_errors() -> Callable[..., float]:
    def measure(device: str, backend: Any, name: str, *, lengths: list[int]) -> float:
        """Error of packed logits as a multiple of plain transformers' on each document alone, both in bfloat16."""
        causal = name in ("gemma3_text", "llama", "qwen3")
        ids, positions = make_ids(lengths)

        def alone(where: str, dtype: torch.dtype) -> Tensor:
            model = make_backbone(name, dtype).model.to(where)
            model.set_attn_implementation("sdpa")
            options = {"use_cache": False} if causal else {}
            return torch.cat([model(part[None].to(where), **options).logits[0] for part in ids.split(lengths)])

        with torch.no_grad():
            exact, rough = alone("cpu", torch.float64), alone(device, torch.bfloat16).double().cpu()
            backbone = make_backbone(name, torch.bfloat16).to(device)
            layout = PackLayout(np.array(lengths), causal=causal, backend=backend, device=device)
            hidden = backbone.encode(ids.to(device), positions.to(device), layout)
            ours = backbone.logits(hidden).double().cpu()
        return float((ours - exact).norm() / (rough - exact).norm())

    return measure


@pytest.fixture
def note() -> Iterator[Callable[[str, float], None]]:
    """Keep the largest error of each kind for the table."""

    def keep(kind: str, error: float) -> None:
        _worst[kind] = max(_worst.get(kind, 0.0), error)

    return keep


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if "LIT_ENCODERS_ROWS" in os.environ:
        for kind, error in _worst.items():
            terminalreporter.write_line(f"| parity | {kind} | largest error {error:.2f} x plain bfloat16 |")
