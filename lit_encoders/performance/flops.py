"""FLOPs of a training step: matrix products by their sizes, attention by the pairs of tokens that see each other.

A multiplication and an addition are two FLOPs. What computes no matrix product (norms, activations, softmax, rotations,
the optimizer) is not counted, nor is what a kernel computes a second time. The counts are those of "model FLOPs" in
Chowdhery et al. (2022), arXiv:2204.02311, appendix B, with each layer's own window and the LM head on target rows only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lit_encoders.models.attention import ATTENTION_NAME, PackLayout, register_packed_attention
from lit_encoders.models.backbone import Backbone
from lit_encoders.models.heads import ExtraHead
from lit_encoders.models.layer_range import Place, map_layers

# Length of each piece of a pack and how many are of it.
Pieces = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Product:
    """A matrix that each row is multiplied with.

    Attributes:
        weights: its elements.
        weight_grad: whether the backward pass computes its gradient.
        input_grad: whether it computes that of its input.
    """

    weights: int
    weight_grad: bool = True
    input_grad: bool = True

    @property
    def flops(self) -> int:
        """FLOPs per row, forward and backward: 2, 4 or 6 per weight."""
        return 2 * self.weights * (1 + self.weight_grad + self.input_grad)


@dataclass(frozen=True)
class AttentionLayer:
    """Scores and values of one layer.

    Attributes:
        heads: query heads.
        head_dim: size of each.
        window: w means that i sees j where |i - j| < w; None for all.
        backward: whether gradients pass through it.
    """

    heads: int
    head_dim: int
    window: int | None = None
    backward: bool = True


@dataclass(frozen=True)
class EncoderShape:
    """What an encoder computes, in the order it does.

    Attributes:
        products: that every token goes through.
        attention: of each layer.
    """

    products: tuple[Product, ...]
    attention: tuple[AttentionLayer, ...]


def attended_pairs(length: int, window: int | None = None, causal: bool = False) -> int:
    """Count the pairs (i, j) of a piece where token i sees token j.

    Args:
        length: tokens of the piece.
        window: w means |i - j| < w; None for all.
        causal: whether j may not come after i.

    >>> attended_pairs(4), attended_pairs(4, causal=True), attended_pairs(4, window=2), attended_pairs(4, 2, True)
    (16, 10, 10, 7)
    """
    reach = length if window is None else min(window, length)
    # Distance d between 0 and reach - 1 has length - d pairs.
    one_sided = reach * length - reach * (reach - 1) // 2
    return one_sided if causal else 2 * one_sided - length


def full_pieces(slots: int, sequence_length: int) -> Pieces:
    """Fill a pack with pieces as long as they may be: no other filling has more pairs of tokens that see each other.

    >>> full_pieces(10, 4)
    [(4, 2), (2, 1)]
    """
    pieces = [(sequence_length, slots // sequence_length), (slots % sequence_length, 1)]
    return [(length, count) for length, count in pieces if length and count]


def attention_flops(layers: Iterable[AttentionLayer], pieces: Pieces, causal: bool = False) -> int:
    """Count scores and weighted values of a pack: forward 4 per pair and element of a head, backward twice that.

    Args:
        layers: of the encoder.
        pieces: of the pack.
        causal: direction.
    """
    total = 0
    for layer in layers:
        pairs = sum(count * attended_pairs(length, layer.window, causal) for length, count in pieces)
        total += (12 if layer.backward else 4) * pairs * layer.heads * layer.head_dim
    return total


def encoder_flops(encoder: EncoderShape, pieces: Pieces, causal: bool = False) -> int:
    """Count an encoder over a pack, attention included, forward and backward.

    Args:
        encoder: its shape.
        pieces: of the pack.
        causal: direction.

    >>> encoder_flops(EncoderShape((Product(10),), (AttentionLayer(heads=2, head_dim=3),)), [(4, 1)])
    1392
    """
    tokens = sum(length * count for length, count in pieces)
    return tokens * sum(product.flops for product in encoder.products) + attention_flops(
        encoder.attention, pieces, causal
    )


def head_flops(head: Iterable[Product], rows: float) -> float:
    """Count an LM head over target rows, forward and backward.

    Args:
        head: its products, the decoder last.
        rows: targets; a mean may be no whole number.
    """
    return rows * sum(product.flops for product in head)


@torch.no_grad()
def encoder_shape(backbone: Backbone) -> EncoderShape:
    """Find out what a backbone's encoder multiplies, by running two tokens through it.

    Gradients that the backward pass can do without are not counted: a frozen matrix has none, and below the lowest
    layer (the embeddings count as the lowest) that trains nothing is computed. In that layer itself the gradient of
    the input is counted, though a part of the layer may do without it.

    Args:
        backbone: on the meta device, where this costs nothing, or any other.
    """
    inputs = _Inputs(backbone)
    names = {id(module): name for name, module in backbone.model.named_modules()}
    layers: list[AttentionLayer] = []

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        sliding_window: int | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        heads, tokens, head_dim = query.shape[1:]
        layers.append(AttentionLayer(heads, head_dim, sliding_window, inputs.need(names[id(module)])))
        return query.new_zeros(1, tokens, heads, value.shape[-1]), None

    def run() -> None:
        device = next(backbone.parameters()).device
        ids = torch.zeros(2, dtype=torch.int64, device=device)
        with _attention(attend):
            backbone.encode(ids, torch.arange(2, device=device), PackLayout(np.array([2])))

    products = [
        Product(weight.numel(), weight.requires_grad, inputs.need(names[id(module)]))
        for module, weight in _multiplied(backbone, run)
    ]
    return EncoderShape(tuple(products), tuple(layers))


@torch.no_grad()
def head_shape(backbone: Backbone, head: str | None = None) -> tuple[Product, ...]:
    """Find out what an LM head multiplies each target row with; the decoder comes last.

    Args:
        backbone: on any device.
        head: name of an added head, None for the model's own.
    """
    like = next(backbone.parameters())
    hidden = like.new_zeros(1, backbone.config.hidden_size)
    reached = _Inputs(backbone).any
    products = []
    for _, weight in _multiplied(backbone, lambda: backbone.transform(hidden, head)):
        products.append(Product(weight.numel(), weight.requires_grad, reached))
        reached = reached or weight.requires_grad
    decoder, _ = backbone.decoder_parameters(head)
    return (*products, Product(decoder.numel(), decoder.requires_grad, reached))


class _Inputs:
    """Which inputs the backward pass needs the gradients of: those that something trainable stands before."""

    def __init__(self, backbone: Backbone) -> None:
        layer_map = map_layers(backbone.model)
        named = dict(backbone.model.named_parameters())
        trains = {place for name, place in layer_map.places.items() if named[name].requires_grad}
        self._path = f"{layer_map.path}."
        self._places = layer_map.places
        numbers = [place for place in trains if isinstance(place, int)]
        self._lowest = -1 if "embeddings" in trains else min(numbers, default=layer_map.num_layers)
        self.any = bool(trains - {"head"})

    def need(self, module: str) -> bool:
        """Whether that of a module of the encoder is needed, by the module's name."""
        place: Place = self._places.get(f"{module}.weight", "head")
        if module.startswith(self._path):
            place = int(module.removeprefix(self._path).partition(".")[0])
        if isinstance(place, int):
            return self._lowest <= place
        return self._lowest < 0 if place == "embeddings" else self.any


def _multiplied(backbone: Backbone, run: Callable[[], Any]) -> list[tuple[nn.Module, nn.Parameter]]:
    """The modules, with their matrices, that a call multiplies by, in its order; embeddings are looked up."""
    found: list[tuple[nn.Module, nn.Parameter]] = []

    def note(module: nn.Module, *_: Any) -> None:
        found.append((module, module.weight))  # type: ignore[arg-type]

    hooks = [
        module.register_forward_hook(note)
        for module in backbone.modules()
        if isinstance(getattr(module, "weight", None), nn.Parameter)
        and module.weight.ndim == 2  # type: ignore[operator]
        and not isinstance(module, nn.Embedding | ExtraHead)  # An added head's own matrix is its decoder.
    ]
    modes = {module: module.training for module in backbone.modules()}
    backbone.eval()  # Blocks that keep only their input would run in another way.
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes.items():
            module.training = training
    return found


@contextmanager
def _attention(attend: Callable[..., tuple[Tensor, None]]) -> Iterator[None]:
    """Let the layers call something else than packed attention for a while."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, attend)
    try:
        yield
    finally:
        register_packed_attention()


@dataclass(frozen=True)
class Work:
    """What a pack of one objective computes, in FLOPs.

    Attributes:
        encoder: products of the encoder.
        attention: its scores and values.
        head: LM heads on their target rows.
        teacher: the forward pass of a teacher.
    """

    encoder: float
    attention: float
    head: float
    teacher: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.encoder + self.attention + self.head + self.teacher


def pack_work(
    encoder: EncoderShape,
    heads: Mapping[str | None, Sequence[Product]],
    rows: Mapping[str | None, float],
    pieces: Pieces,
    causal: bool,
    teacher: tuple[EncoderShape, Sequence[Product], float] | None = None,
) -> Work:
    """Count a pack.

    Args:
        encoder: its shape.
        heads: products of each LM head, by its name.
        rows: target rows of each head that is used.
        pieces: of the pack.
        causal: direction.
        teacher: shape and head of a teacher whose parameters are frozen, and the rows that it is asked about.
    """
    attention = attention_flops(encoder.attention, pieces, causal)
    taught = 0.0
    if teacher is not None:
        shape, head, asked = teacher
        taught = encoder_flops(shape, pieces, causal) + head_flops(head, asked)
    return Work(
        encoder=encoder_flops(encoder, pieces, causal) - attention,
        attention=attention,
        head=sum(head_flops(heads[name], count) for name, count in rows.items()),
        teacher=taught,
    )
