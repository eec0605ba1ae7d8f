"""One vector for each text, out of an encoder that reads many texts in one pack."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from lit_encoders.data.packs import best_fit
from lit_encoders.data.tokens import affixes, encode, num_ids
from lit_encoders.models.attention import PackLayout
from lit_encoders.models.backbone import Backbone
from lit_encoders.modules.lit_encoder import LitEncoder

Pooling = Literal["mean", "first"]


def pool(hidden: Tensor, lengths: Tensor, pooling: Pooling) -> Tensor:
    """Turn the hidden states of a pack into one vector for each of its texts.

    Args:
        hidden: (T, D).
        lengths: tokens of each text, in order, int64 (N,); their sum is T, each at least 1.
        pooling: the mean over all tokens of a text, special ones included, or its first token.

    Returns:
        (N, D), in the type of ``hidden``.

    >>> pool(torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([2, 1]), "mean").tolist()
    [[2.0], [5.0]]
    """
    if pooling == "first":
        return hidden[lengths.cumsum(0) - lengths]
    texts = torch.repeat_interleave(torch.arange(len(lengths), device=hidden.device), lengths)
    sums = hidden.new_zeros(len(lengths), hidden.shape[1]).index_add_(0, texts, hidden)
    return sums / lengths[:, None]


def embed(
    module: LitEncoder,
    texts: Sequence[str],
    *,
    sequence_length: int = 512,
    slots: int = 4096,
    pooling: Pooling = "mean",
    causal: bool | None = None,
) -> Tensor:
    """Embed texts with the encoder as it stands, without dropout; a text's vector does not depend on its neighbours.

    Args:
        module: of the model; its tokenizer reads the texts.
        texts: a text that is longer is cut off.
        sequence_length: longest text, in tokens, special ones included.
        slots: most tokens of a pack.
        pooling: see `pool`.
        causal: whether texts are read from left to right only; None as the module's objective reads them.

    Returns:
        float32 (N, D) on the CPU, in the order of the texts.

    Raises:
        ValueError: a text cannot stand in a pack, the model has too few positions, or no such pooling.
    """
    if pooling not in get_args(Pooling):
        raise ValueError(f"pooling must be one of {', '.join(get_args(Pooling))}, got {pooling!r}")
    rows = token_rows(module, texts, sequence_length, slots)
    found = torch.empty(len(rows), module.config.hidden_size)
    for pack, sizes, hidden in read_packs(module, rows, slots, causal, last_hidden):
        found[pack] = pool(hidden[0], sizes, pooling).cpu()
    return found


def embed_layers(
    module: LitEncoder,
    texts: Sequence[str],
    *,
    sequence_length: int = 512,
    slots: int = 4096,
    causal: bool | None = None,
) -> Tensor:
    """The mean over each text's tokens of what every layer gives out, before a final norm.

    Args:
        module, texts, sequence_length, slots, causal: see `embed`.

    Returns:
        float32 (L, N, D) on the CPU: layers from the first, texts in their order.

    Raises:
        ValueError: as `embed`.
    """
    found: Tensor | None = None
    rows = token_rows(module, texts, sequence_length, slots)
    for pack, sizes, hidden in read_packs(module, rows, slots, causal, every_layer):
        if found is None:
            found = torch.empty(len(hidden), len(rows), hidden[0].shape[1])
        for layer, states in enumerate(hidden):
            found[layer, pack] = pool(states, sizes, "mean").cpu()
    if found is None:
        raise ValueError("texts must be at least one, got none")
    return found


def last_hidden(backbone: Backbone) -> list[nn.Module]:
    """The part of a backbone that gives out the last hidden states, for `read_packs`."""
    return [backbone.model.base_model]


def every_layer(backbone: Backbone) -> list[nn.Module]:
    """The layers of a backbone, for `read_packs`."""
    return list(backbone.layers)


@torch.no_grad()
def read_packs(
    module: LitEncoder,
    rows: Sequence[Sequence[int]],
    slots: int,
    causal: bool | None,
    watched: Callable[[Backbone], list[nn.Module]],
) -> Iterator[tuple[list[int], Tensor, list[Tensor]]]:
    """Run an encoder over texts, pack by pack, and give what parts of it say.

    Args:
        module, slots, causal: see `embed`.
        rows: token ids of each text, special ones included; at least one each and at most ``slots``.
        watched: of the backbone, the parts whose outputs are wanted, such as `last_hidden`.

    Yields:
        Numbers of a pack's texts, their lengths in tokens, int64 (N,), and the outputs, float32 (T, D) each.
    """
    module.configure_model()
    assert module.backbone is not None
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    device = next(module.backbone.parameters()).device
    direction = module.objective == "clm" if causal is None else causal
    said: list[Tensor] = []

    def note(part: nn.Module, inputs: Any, output: Any) -> None:
        states = output if isinstance(output, Tensor) else output[0]
        said.append(states[0].float())

    was_training = module.backbone.training
    module.backbone.eval()
    hooks = [part.register_forward_hook(note) for part in watched(module.backbone)]
    try:
        for pack in best_fit(lengths, slots):
            sizes = lengths[pack]
            ids = torch.tensor([token for row in pack for token in rows[row]], device=device)
            positions = torch.cat([torch.arange(size) for size in sizes.tolist()]).to(device)
            # The whole backbone, not its encoder alone: a sharded one is gathered there.
            module.backbone(ids, positions, PackLayout(sizes, causal=direction), [])
            yield pack, torch.tensor(sizes, device=device), said
            said.clear()
    finally:
        for hook in hooks:
            hook.remove()
        module.backbone.train(was_training)


def token_rows(module: LitEncoder, texts: Sequence[str], sequence_length: int, slots: int) -> list[list[int]]:
    """Token ids of each text with its special tokens, cut off at ``sequence_length``.

    Raises:
        ValueError: as `embed`.
    """
    if module.max_positions is not None and sequence_length > module.max_positions:
        raise ValueError(f"sequence_length must be at most the model's {module.max_positions}, got {sequence_length}")
    around = affixes(module.tokenizer)
    content = sequence_length - len(around.prefix) - len(around.suffix)
    if content < 1:
        special = sequence_length - content
        raise ValueError(f"sequence_length must be above a text's {special} special tokens, got {sequence_length}")
    if slots < sequence_length:
        raise ValueError(f"slots must hold a text of sequence_length ({sequence_length}), got {slots}")
    encoded = encode(list(texts), module.tokenizer, num_ids(module.tokenizer))
    rows = [[*around.prefix, *ids[:content], *around.suffix] for ids in encoded]
    for text, row in zip(texts, rows, strict=True):
        if not row:
            raise ValueError(f"texts must have at least one token each, got none in {text!r}")
    return rows
