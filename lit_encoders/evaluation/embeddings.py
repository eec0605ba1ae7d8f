"""One vector for each text, out of an encoder that reads many texts in one pack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from lit_encoders.data.packs import best_fit
from lit_encoders.data.tokens import affixes, encode, num_ids
from lit_encoders.models.attention import PackLayout
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


@torch.no_grad()
def embed(
    module: LitEncoder,
    texts: Sequence[str],
    *,
    sequence_length: int = 512,
    slots: int = 4096,
    pooling: Pooling = "mean",
) -> Tensor:
    """Embed texts with the encoder as it stands, without dropout; a text's vector does not depend on its neighbours.

    Args:
        module: of the model; its tokenizer reads the texts, its objective says in which direction they are read.
        texts: a text that is longer is cut off.
        sequence_length: longest text, in tokens, special ones included.
        slots: most tokens of a pack.
        pooling: see `pool`.

    Returns:
        float32 (N, D) on the CPU, in the order of the texts.

    Raises:
        ValueError: a text cannot stand in a pack, the model has too few positions, or no such pooling.
    """
    if pooling not in get_args(Pooling):
        raise ValueError(f"pooling must be one of {', '.join(get_args(Pooling))}, got {pooling!r}")
    module.configure_model()
    assert module.backbone is not None
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
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    if len(lengths) and lengths.min() == 0:
        raise ValueError(f"texts must have at least one token each, got none in {texts[int(lengths.argmin())]!r}")
    device = next(module.backbone.parameters()).device
    found = torch.empty(len(rows), module.config.hidden_size)
    was_training = module.backbone.training
    module.backbone.eval()
    try:
        for pack in best_fit(lengths, slots):
            sizes = lengths[pack]
            ids = torch.tensor([token for row in pack for token in rows[row]], device=device)
            positions = torch.cat([torch.arange(size) for size in sizes.tolist()]).to(device)
            hidden = module.backbone.encode(ids, positions, PackLayout(sizes, causal=module.objective == "clm"))
            found[pack] = pool(hidden.float(), torch.tensor(sizes, device=device), pooling).cpu()
    finally:
        module.backbone.train(was_training)
    return found
