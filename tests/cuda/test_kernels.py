"""The real attention kernels of a GPU against float64, alone and inside whole models."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lit_encoders.models.attention import PackLayout, choose_backend, packed_attention

NO_GPU = "" if torch.cuda.is_available() else "needs a CUDA device"
NO_FLASH_ATTN = "" if importlib.util.find_spec("flash_attn") else "flash-attn is not installed"
pytestmark = pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU)

FLASH_ATTN = pytest.param(
    "flash_attn", marks=pytest.mark.skipif(bool(NO_GPU or NO_FLASH_ATTN), reason=NO_GPU or NO_FLASH_ATTN)
)
BACKENDS = pytest.mark.parametrize("backend", ["varlen", FLASH_ATTN, "sdpa"])
KERNELS = pytest.mark.parametrize("backend", ["varlen", FLASH_ATTN])
DIRECTIONS = pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
# flash-attn's own tests (Dao-AILab/flash-attention, tests/test_flash_attn.py) allow a kernel twice the error of plain
# attention in the same precision, and three times in gradients. A window off by one would be above 50 times.
FORWARD_LIMIT, GRADIENT_LIMIT = 2.0, 3.0
LENGTHS = [2, 7, 7, 65, 130, 400]
MODELS = ["bert", "gemma3_text", "llama", "modernbert", "nomic_bert", "qwen3"]

Measure = Callable[..., Any]


def test_auto_takes_the_kernel_inside_torch() -> None:
    assert choose_backend("auto", "cuda", torch.bfloat16) == "varlen"


@BACKENDS
@DIRECTIONS
@pytest.mark.parametrize("window", [None, 1, 9, 65])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=["mha", "gqa", "mqa"])
def test_packed_attention_equals_float64(
    attention_errors: Measure, note: Measure, backend: str, causal: bool, window: int | None, heads: tuple[int, int]
) -> None:
    forward, gradients = attention_errors("cuda", backend, causal=causal, window=window, heads=heads)
    note(f"{backend}, output", forward)
    note(f"{backend}, gradients", gradients)
    assert forward <= FORWARD_LIMIT
    assert gradients <= GRADIENT_LIMIT


@KERNELS
@DIRECTIONS
@pytest.mark.parametrize("width", [8, 32, 128, 256])
def test_every_width_of_head(attention_errors: Measure, backend: str, causal: bool, width: int) -> None:
    forward, gradients = attention_errors("cuda", backend, causal=causal, window=65, width=width)
    assert forward <= FORWARD_LIMIT
    assert gradients <= GRADIENT_LIMIT


@KERNELS
@DIRECTIONS
def test_documents_never_see_each_other(backend: Any, causal: bool) -> None:
    """Other neighbours, the same bits."""
    lengths = np.array([3, 64, 130, 700])
    layout = PackLayout(lengths, causal=causal, backend=backend, device="cuda")
    q, k, v = (torch.randn(1, 4, int(lengths.sum()), 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    before, _ = packed_attention(nn.Identity(), q, k, v, None, packing=layout)
    document = slice(3, 67)
    k[:, :, document], v[:, :, document] = 1e3, -1e3
    after, _ = packed_attention(nn.Identity(), q, k, v, None, packing=layout)
    outside = [*range(3), *range(67, int(lengths.sum()))]
    assert torch.equal(before[:, outside], after[:, outside])
    assert not torch.equal(before[:, document], after[:, document])


@KERNELS
@DIRECTIONS
@pytest.mark.parametrize("mixed", [True, False], ids=["autocast", "bfloat16 weights"])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_of_a_backbone(
    backbone_errors: Measure, note: Measure, backend: str, name: str, causal: bool, mixed: bool
) -> None:
    losses, gradients = backbone_errors("cuda", backend, name, causal=causal, mixed=mixed, lengths=LENGTHS)
    note(f"{backend}, losses of whole models", losses)
    note(f"{backend}, gradients of whole models", gradients)
    assert losses <= FORWARD_LIMIT
    assert gradients <= GRADIENT_LIMIT


@KERNELS
@pytest.mark.parametrize("name", MODELS)
def test_packed_backbone_equals_plain_transformers(
    plain_errors: Measure, note: Measure, backend: str, name: str
) -> None:
    error = plain_errors("cuda", backend, name, lengths=LENGTHS)
    note(f"{backend}, logits beside plain transformers", error)
    assert error <= FORWARD_LIMIT
