"""Packed attention against a dense softmax with a pure mask, on every back-end."""

import importlib.util
import inspect
import sys
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lit_encoders.models.attention import PackLayout, choose_backend, packed_attention

LENGTHS = [1, 2, 5, 5, 9, 9, 10, 19, 40, 40, 5]
TOKENS, HEADS, WIDTH = sum(LENGTHS), 4, 8
LAYER = nn.Identity()
DIRECTIONS = pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
WINDOWS = pytest.mark.parametrize("window", [None, 1, 2, 9, 64])


def states(key_heads: int = HEADS, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, heads, TOKENS, WIDTH, dtype=torch.float64, generator=draw).requires_grad_()
        for heads in (HEADS, key_heads, key_heads)
    ]


def visible(bounds: list[int], left: int, right: int) -> Tensor:
    """What each token sees: its own document, at most ``left`` before and ``right`` behind it; -1 is all."""
    mask = torch.zeros(bounds[-1], bounds[-1], dtype=torch.bool)
    for start, stop in pairwise(bounds):
        for i in range(start, stop):
            first = start if left < 0 else max(start, i - left)
            last = stop if right < 0 else min(stop, i + right + 1)
            mask[i, first:last] = True
    return mask


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """Softmax attention over (H, T, D) by its formula; returns (T, H, D)."""
    k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v).transpose(0, 1)


def boundaries(lengths: list[int] = LENGTHS) -> list[int]:
    return [0, *np.cumsum(lengths).tolist()]


def sides(window: int | None, causal: bool) -> tuple[int, int]:
    reach = -1 if window is None else window - 1
    return reach, 0 if causal else reach


def attend(q: Tensor, k: Tensor, v: Tensor, backend: Any = "sdpa", causal: bool = False, **options: Any) -> Tensor:
    layout = PackLayout(np.array(LENGTHS), causal=causal, backend=backend)
    out, weights = packed_attention(LAYER, q, k, v, None, packing=layout, **options)
    assert weights is None
    return out


@DIRECTIONS
@WINDOWS
@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("key_heads", [HEADS, 2, 1])
def test_sdpa_equals_dense_attention(causal: bool, window: int | None, scaling: float | None, key_heads: int) -> None:
    ours, theirs = states(key_heads), states(key_heads)
    out = attend(*ours, causal=causal, scaling=scaling, sliding_window=window)
    expected = dense(*(x[0] for x in theirs), visible(boundaries(), *sides(window, causal)), scaling)[None]
    assert out.shape == (1, TOKENS, HEADS, WIDTH)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    out.square().sum().backward()
    expected.square().sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-12)


@DIRECTIONS
def test_c08_window_of_long_documents_is_exact_for_every_length(causal: bool) -> None:
    """Blocks of twice the window: lengths around their multiples are where an off-by-one would show."""
    for window in (2, 4):
        for length in range(1, 6 * window):
            q, k, v = (torch.randn(1, 2, length, 4, dtype=torch.float64) for _ in range(3))
            layout = PackLayout(np.array([length]), causal=causal)
            out, _ = packed_attention(LAYER, q, k, v, None, packing=layout, sliding_window=window)
            expected = dense(q[0], k[0], v[0], visible([0, length], *sides(window, causal)), None)[None]
            torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


@DIRECTIONS
def test_window_layers_never_make_a_square_of_the_length(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear in the length: the masks hold blocks x block x span bits."""
    real, sizes = torch.nn.functional.scaled_dot_product_attention, []

    def record(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        sizes.append(q.shape[0] * q.shape[-2] * k.shape[-2])
        return real(q, k, v, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    for length in (1000, 2000):
        q = torch.randn(1, 1, length, 4)
        packed_attention(LAYER, q, q, q, None, packing=PackLayout(np.array([length]), causal=causal), sliding_window=9)
    assert sizes[1] / sizes[0] == pytest.approx(2, rel=0.05)
    assert sizes[1] < 2000 * 40


def test_like_lengths_side_by_side_are_one_group() -> None:
    layout = PackLayout(np.array([3, 3, 4, 3]))
    assert layout.groups == [(3, 2), (4, 1), (3, 1)]
    assert layout.sizes == [6, 4, 3]
    assert layout.max_length == 4


@DIRECTIONS
@pytest.mark.parametrize("window", [None, 9])
def test_dropout_is_unbiased_and_drops(causal: bool, window: int | None) -> None:
    """Values of one: dropping half of the weights and doubling the rest leaves 1 on average."""
    q, k, v = states()
    torch.manual_seed(0)
    out = attend(q, k, torch.ones_like(v), causal=causal, dropout=0.5, sliding_window=window).detach()
    assert out.mean().item() == pytest.approx(1, abs=0.1)
    assert out.std() > 0.1
    torch.manual_seed(0)
    assert torch.equal(out, attend(q, k, torch.ones_like(v), causal=causal, dropout=0.5, sliding_window=window))


def test_attention_mask_is_refused() -> None:
    with pytest.raises(ValueError, match="takes no attention_mask"):
        packed_attention(LAYER, *states(), torch.ones(1), packing=PackLayout(np.array(LENGTHS)))


# The kernels of a GPU, replaced by the dense formula under their real signatures.

Calls = list[dict[str, Any]]


@pytest.fixture
def varlen_calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    from torch.nn.attention import varlen

    signature, calls = inspect.signature(varlen.varlen_attn), []

    def varlen_attn(*args: Any, **kwargs: Any) -> Tensor:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        call = given.arguments
        calls.append(call)
        q, k, v = (call[name].transpose(0, 1) for name in ("query", "key", "value"))
        assert call["enable_gqa"] or len(q) == len(k)
        return dense(q, k, v, visible(call["cu_seq_q"].tolist(), *call["window_size"]), call["scale"])

    varlen_attn.__signature__ = signature  # type: ignore[attr-defined]
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    return calls


@pytest.fixture
def flash_attn_calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls: Calls = []

    # The signature of flash-attn 2.8.
    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Any = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Any = None,
    ) -> Tensor:
        calls.append(dict(locals()))
        left, right = window_size
        mask = visible(cu_seqlens_q.tolist(), left, 0 if causal else right)
        return dense(*(x.transpose(0, 1) for x in (q, k, v)), mask, softmax_scale)

    module = ModuleType("flash_attn")
    module.__spec__ = ModuleSpec("flash_attn", None)
    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return calls


EXPECTED_SIDES = {(None, False): (-1, -1), (None, True): (-1, 0), (9, False): (8, 8), (9, True): (8, 0)}
CASES = pytest.mark.parametrize(("window", "causal"), list(EXPECTED_SIDES))


@CASES
@pytest.mark.parametrize("key_heads", [HEADS, 2])
def test_varlen_equals_sdpa(varlen_calls: Calls, window: int | None, causal: bool, key_heads: int) -> None:
    ours, theirs = states(key_heads), states(key_heads)
    options = {"causal": causal, "sliding_window": window, "scaling": 0.3}
    out, expected = attend(*ours, backend="varlen", **options), attend(*theirs, **options)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    out.square().sum().backward()
    expected.square().sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-12)

    (call,) = varlen_calls
    assert call["window_size"] == EXPECTED_SIDES[window, causal]
    assert call["scale"] == 0.3
    assert call["query"].shape == (TOKENS, HEADS, WIDTH)
    assert call["key"].shape == call["value"].shape == (TOKENS, key_heads, WIDTH)
    assert all(call[name].is_contiguous() for name in ("query", "key", "value"))
    assert call["cu_seq_q"].tolist() == call["cu_seq_k"].tolist() == boundaries()
    assert call["cu_seq_q"].dtype == torch.int32
    assert call["max_q"] == call["max_k"] == 40
    assert call["enable_gqa"] is (key_heads != HEADS)


@CASES
@pytest.mark.parametrize("key_heads", [HEADS, 2])
def test_flash_attn_equals_sdpa(flash_attn_calls: Calls, window: int | None, causal: bool, key_heads: int) -> None:
    q, k, v = states(key_heads)
    options = {"causal": causal, "sliding_window": window, "scaling": 0.3}
    out, expected = attend(q, k, v, backend="flash_attn", **options), attend(q, k, v, **options)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)

    (call,) = flash_attn_calls
    assert call["window_size"] == EXPECTED_SIDES[window, causal]
    assert call["causal"] is causal
    assert call["softmax_scale"] == 0.3
    assert call["dropout_p"] == 0
    assert call["q"].shape == (TOKENS, HEADS, WIDTH)
    assert call["k"].shape == call["v"].shape == (TOKENS, key_heads, WIDTH)
    assert all(call[name].is_contiguous() for name in ("q", "k", "v"))
    assert call["cu_seqlens_q"].tolist() == call["cu_seqlens_k"].tolist() == boundaries()
    assert call["cu_seqlens_q"].dtype == torch.int32
    assert call["max_seqlen_q"] == call["max_seqlen_k"] == 40


def test_dropout_reaches_flash_attn_and_is_refused_by_varlen(varlen_calls: Calls, flash_attn_calls: Calls) -> None:
    attend(*states(), backend="flash_attn", dropout=0.1)
    assert flash_attn_calls[0]["dropout_p"] == 0.1
    with pytest.raises(ValueError, match="'varlen' has no attention dropout"):
        attend(*states(), backend="varlen", dropout=0.1)
    assert not varlen_calls


# Which back-end


@pytest.mark.parametrize("requested", ["varlen", "flash_attn"])
def test_b04_explicit_kernel_on_a_cpu_is_an_error(requested: Any) -> None:
    with pytest.raises(ValueError, match=rf"model\.attention: '{requested}' is not available: it needs a CUDA device"):
        choose_backend(requested, "cpu", torch.bfloat16)


@pytest.mark.usefixtures("flash_attn_calls")
def test_b04_auto_on_a_cpu_is_sdpa_with_flash_attn_installed() -> None:
    assert choose_backend("auto", "cpu", torch.bfloat16) == "sdpa"


def test_unknown_backend_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"model\.attention must be .*, got 'eager'"):
        choose_backend("eager", "cpu", torch.float32)  # type: ignore[arg-type]


@pytest.mark.usefixtures("flash_attn_calls")
def test_auto_takes_the_fastest_that_can_run() -> None:
    assert choose_backend("auto", "cuda", torch.bfloat16) == "varlen"
    assert choose_backend("auto", "cuda", torch.float16) == "varlen"
    assert choose_backend("auto", "cuda", torch.bfloat16, attention_dropout=0.1) == "flash_attn"
    assert choose_backend("auto", "cuda", torch.float32) == "sdpa"
    assert choose_backend("flash_attn", "cuda", torch.bfloat16) == "flash_attn"
    assert choose_backend("sdpa", "cuda", torch.bfloat16) == "sdpa"


def test_explicit_kernels_say_what_they_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"float16 or bfloat16 \(trainer\.precision\), not torch\.float32"):
        choose_backend("varlen", "cuda", torch.float32)
    with pytest.raises(ValueError, match=r"no attention dropout and the model's configuration asks for 0\.1"):
        choose_backend("varlen", "cuda", torch.bfloat16, attention_dropout=0.1)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install flash-attn"):
        choose_backend("flash_attn", "cuda", torch.bfloat16)
    with pytest.raises(ValueError, match=r"has no torch\.nn\.attention\.varlen"):
        choose_backend("varlen", "cuda", torch.bfloat16)
    assert choose_backend("auto", "cuda", torch.bfloat16) == "sdpa"


def test_a_varlen_without_grouped_heads_gets_repeated_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 has no ``enable_gqa``."""
    import torch.nn.attention.varlen as varlen

    seen: list[torch.Size] = []

    def varlen_attn(
        query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
        scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:  # fmt: skip
        seen.extend([key.shape, value.shape])
        return query

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    layout = PackLayout(np.array([3, 4]), backend="varlen")
    q, kv = torch.randn(1, 4, 7, 8), torch.randn(1, 2, 7, 8)
    packed_attention(nn.Module(), q, kv, kv, None, packing=layout)
    assert seen == [torch.Size([7, 4, 8])] * 2


def test_flash_kernels_get_one_type_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotations leave queries and keys in float32 in some models, beside values in bfloat16."""
    from lit_encoders.models import attention

    seen: list[torch.dtype] = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        seen.extend([q.dtype, k.dtype, v.dtype])
        return q.transpose(0, 1)

    monkeypatch.setitem(attention._KERNELS, "varlen", kernel)
    q, v = torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        packed_attention(nn.Module(), q, q, v, None, packing=PackLayout(np.array([3, 4]), backend="varlen"))
    assert seen == [torch.bfloat16] * 3
