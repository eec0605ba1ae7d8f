"""Packed attention with a direction, for any Hugging Face model that lets attention be replaced.

Documents of a pack never see each other, forwards or backwards. Three back-ends compute the same thing: ``sdpa`` runs
everywhere, ``varlen`` is the FlashAttention inside torch, ``flash_attn`` the package of that name.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

AttentionBackend = Literal["auto", "varlen", "flash_attn", "sdpa"]
ATTENTION_NAME = "lit_encoders_packed"


class PackLayout:
    """Where the documents of a pack lie, and which way attention looks.

    One opaque object, so that a compiled model does not see a new list of numbers with every pack.

    Args:
        lengths: tokens of each segment in pack order, padding included, (S,). Like lengths that lie together are
            computed together.
        causal: whether a token sees itself and what precedes it only.
        backend: which kernel runs.
        device: where the pack is; boundaries go there for the kernels that read them.
    """

    def __init__(
        self,
        lengths: npt.NDArray[np.int64],
        *,
        causal: bool = False,
        backend: Literal["varlen", "flash_attn", "sdpa"] = "sdpa",
        device: torch.device | str = "cpu",
    ) -> None:
        self.causal = causal
        self.backend = backend
        self.max_length = int(lengths.max())
        self.groups = [(length, len(list(same))) for length, same in groupby(lengths.tolist())]
        self.sizes = [length * count for length, count in self.groups]
        self.boundaries = None
        if backend != "sdpa":
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            self.boundaries = torch.from_numpy(offsets).to(device, non_blocking=True)


@dataclass(frozen=True)
class _Call:
    """What one attention layer asks for, besides the tensors."""

    causal: bool
    scale: float | None
    dropout: float
    window: int | None


def _attend_full(q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=call.dropout, is_causal=call.causal, scale=call.scale)


def _window_mask(block: int, num_blocks: int, length: int, call: _Call, device: torch.device) -> Tensor:
    """Which keys of its span each query of each block sees, bool (blocks, 1, block, span)."""
    assert call.window is not None
    reach = call.window - 1
    span = block + (reach if call.causal else 2 * reach)
    blocks = torch.arange(num_blocks, device=device)[:, None, None] * block
    query = blocks + torch.arange(block, device=device)[None, :, None]
    key = blocks - reach + torch.arange(span, device=device)[None, None, :]
    distance = query - key
    seen = (distance >= 0 if call.causal else distance >= -reach) & (distance <= reach)
    # A padded query past the end attends to itself, so that no row of the softmax is empty.
    inside = ((key >= 0) & (key < length)) | ((query >= length) & (query == key))
    return (seen & inside)[:, None]


def _attend_window(q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
    """Sliding window in blocks of queries against their neighbouring keys: linear in the length.

    Args:
        q: queries (N, H, L, D) of N documents; ``k`` and ``v`` likewise.
        call: its window w means |i - j| < w.
    """
    assert call.window is not None
    num, heads, length, _ = q.shape
    reach = call.window - 1
    block = min(2 * call.window, length)
    num_blocks = -(-length // block)
    tail = num_blocks * block - length
    after = tail if call.causal else tail + reach

    def spans(x: Tensor) -> Tensor:
        span = block + (reach if call.causal else 2 * reach)
        x = F.pad(x, (0, 0, reach, after)).unfold(2, span, block)  # (N, H, blocks, D, span)
        return x.permute(0, 2, 1, 4, 3).flatten(0, 1)

    blocks = F.pad(q, (0, 0, 0, tail)).unflatten(2, (num_blocks, block)).transpose(1, 2).flatten(0, 1)
    mask = _window_mask(block, num_blocks, length, call, q.device).repeat(num, 1, 1, 1)
    out = F.scaled_dot_product_attention(
        blocks, spans(k), spans(v), attn_mask=mask, dropout_p=call.dropout, scale=call.scale
    )
    joined: Tensor = out.unflatten(0, (num, num_blocks)).transpose(1, 2).reshape(num, heads, -1, q.shape[-1])
    return joined[:, :, :length]


def _like_queries(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat the fewer heads of grouped keys and values, (H', T, D) -> (H, T, D)."""
    if len(k) == len(q):
        return k, v
    return k.repeat_interleave(len(q) // len(k), dim=0), v.repeat_interleave(len(q) // len(v), dim=0)


def _by_groups(q: Tensor, k: Tensor, v: Tensor, layout: PackLayout, call: _Call) -> Tensor:
    """Run scaled-dot-product attention once per run of documents of one length.

    Args:
        q: (H, T, D); ``k`` and ``v`` likewise.

    Returns:
        (T, H, D).
    """
    k, v = _like_queries(q, k, v)
    outputs = []
    # `split` costs one concatenation in the backward; a slice per group would cost a zero-filled gradient each.
    pieces = zip(layout.groups, *(x.split(layout.sizes, dim=1) for x in (q, k, v)), strict=True)
    for (length, count), *group in pieces:
        queries, keys, values = (x.unflatten(1, (count, length)).transpose(0, 1) for x in group)
        attend = _attend_full if call.window is None or length <= call.window else _attend_window
        out = attend(queries, keys, values, call)  # (count, H, length, D)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


def _sides(call: _Call) -> tuple[int, int]:
    """The window as the flash kernels count it: keys to the left and to the right, -1 for all."""
    reach = -1 if call.window is None else call.window - 1
    return (reach, 0 if call.causal else reach)


def _varlen(q: Tensor, k: Tensor, v: Tensor, layout: PackLayout, call: _Call) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if call.dropout:
        raise ValueError("model.attention: 'varlen' has no attention dropout; choose 'flash_attn' or 'sdpa'")
    grouped: dict[str, Any] = {"enable_gqa": len(k) != len(q)}
    if "enable_gqa" not in inspect.signature(varlen_attn).parameters:  # torch 2.11
        grouped, (k, v) = {}, _like_queries(q, k, v)
    q, k, v = (x.transpose(0, 1).contiguous() for x in (q, k, v))
    bounds, longest = layout.boundaries, layout.max_length
    assert bounds is not None
    out = varlen_attn(
        q,
        k,
        v,
        bounds,
        bounds,
        longest,
        longest,
        scale=call.scale,
        window_size=_sides(call),
        **grouped,
    )
    assert isinstance(out, Tensor)
    return out


def _flash_attn(q: Tensor, k: Tensor, v: Tensor, layout: PackLayout, call: _Call) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    bounds, longest = layout.boundaries, layout.max_length
    out: Tensor = flash_attn_varlen_func(
        *(x.transpose(0, 1).contiguous() for x in (q, k, v)),
        cu_seqlens_q=bounds,
        cu_seqlens_k=bounds,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        dropout_p=call.dropout,
        softmax_scale=call.scale,
        causal=call.causal,
        window_size=_sides(call),
    )
    return out


_KERNELS: dict[str, Callable[[Tensor, Tensor, Tensor, PackLayout, _Call], Tensor]] = {
    "sdpa": _by_groups,
    "varlen": _varlen,
    "flash_attn": _flash_attn,
}


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def _attend(q: Tensor, k: Tensor, v: Tensor, layout: PackLayout, call: _Call) -> Tensor:
    # The boundaries of a pack differ from pack to pack: traced, each would compile anew.
    device = q.device.type
    if layout.backend != "sdpa" and torch.is_autocast_enabled(device):
        # Rotations leave queries and keys in float32 in some models; the flash kernels take one narrow type for all.
        q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
    return _KERNELS[layout.backend](q, k, v, layout, call)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: PackLayout,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend inside each document of a pack, in the direction of ``packing``.

    The signature is that of transformers' ``AttentionInterface``.

    Args:
        module: the attention layer that calls (unused).
        query: (1, H, T, D); ``key`` and ``value`` may have fewer heads (grouped queries).
        attention_mask: must be None: the pack says what may be seen.
        packing: the documents' boundaries, the direction and the kernel.
        scaling: factor on the scores, 1/sqrt(D) where None.
        dropout: probability of dropping an attention weight.
        sliding_window: w means that i sees j where |i - j| < w; None for all.

    Returns:
        The output (1, T, H, D), and None in place of the weights.
    """
    if attention_mask is not None:
        raise ValueError("packed attention takes no attention_mask: the pack's boundaries say what may be seen")
    q, k, v = query[0], key[0], value[0]
    call = _Call(packing.causal, scaling, dropout, sliding_window)
    return _attend(q, k, v, packing, call)[None], None


def register_packed_attention() -> None:
    """Make `packed_attention` known to transformers under `ATTENTION_NAME`, with no mask of its own."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, lambda *args, **kwargs: None)


def choose_backend(
    requested: AttentionBackend, device_type: str, dtype: torch.dtype, attention_dropout: float = 0.0
) -> Literal["varlen", "flash_attn", "sdpa"]:
    """Turn ``auto`` into the fastest back-end that is there, and refuse an explicit one that is not.

    Args:
        requested: the user's word.
        device_type: "cuda", "cpu", ...
        dtype: what attention computes in; the flash kernels take float16 and bfloat16.
        attention_dropout: probability that the model's configuration asks for; ``varlen`` has none.

    Raises:
        ValueError: the requested back-end cannot run here; the message says why.

    >>> choose_backend("auto", "cpu", torch.bfloat16)
    'sdpa'
    """

    def obstacle(name: str) -> str | None:
        if device_type != "cuda":
            return f"it needs a CUDA device, this run is on {device_type!r}"
        if dtype not in (torch.float16, torch.bfloat16):
            return f"it computes in float16 or bfloat16 (trainer.precision), not {dtype}"
        if name == "varlen":
            if importlib.util.find_spec("torch.nn.attention.varlen") is None:
                return f"torch {torch.__version__} has no torch.nn.attention.varlen"
            if attention_dropout:
                return f"it has no attention dropout and the model's configuration asks for {attention_dropout}"
        if name == "flash_attn" and importlib.util.find_spec("flash_attn") is None:
            return "the package is not installed: pip install flash-attn --no-build-isolation"
        return None

    if requested == "auto":
        if obstacle("varlen") is None:
            return "varlen"
        return "flash_attn" if obstacle("flash_attn") is None else "sdpa"
    if requested == "sdpa":
        return "sdpa"
    if requested not in ("varlen", "flash_attn"):
        raise ValueError(f"model.attention must be 'auto', 'varlen', 'flash_attn' or 'sdpa', got {requested!r}")
    reason = obstacle(requested)
    if reason:
        raise ValueError(f"model.attention: {requested!r} is not available: {reason}")
    return requested
