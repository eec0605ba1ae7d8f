"""How well a model predicts held-out text: perplexity, and bits per byte, which tokenizers do not decide.

CLM: every token but a document's first is predicted once, from as many tokens before it as the window holds: windows
overlap, and each predicts only what the one before did not. MLM: windows follow each other, and a fixed share of each
one's tokens is masked and predicted; the figures are those of the masked tokens (a pseudo-likelihood), so that they
compare models of one kind at one mask ratio and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lit_encoders.data.packs import best_fit
from lit_encoders.data.tokens import affixes, encode, num_ids
from lit_encoders.evaluation.scores import Combine, FloatArray, Scores
from lit_encoders.models.attention import PackLayout
from lit_encoders.models.backbone import RowGroup
from lit_encoders.modules.lit_encoder import LitEncoder
from lit_encoders.objectives.masking import mlm_targets

# The same masks for every model with a tokenizer.
_MASK_SEED = 0


@dataclass(frozen=True)
class Window:
    """A piece of a document that is read at once.

    Attributes:
        document: number of the document.
        ids: its tokens, special ones included.
        first_target: CLM predicts the tokens from this one on; MLM masks among all.
    """

    document: int
    ids: tuple[int, ...]
    first_target: int


def sliding_windows(ids: Sequence[int], size: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Windows over a document: where each begins, ends, and which token it predicts first.

    Args:
        ids: of the document, special tokens included.
        size: longest window, at least 2.
        stride: tokens that a window adds, in [1, size - 1]: the first of them needs one before it.

    >>> list(sliding_windows(range(10), 6, 3))
    [(0, 6, 1), (3, 9, 6), (4, 10, 9)]
    """
    end = min(size, len(ids))
    yield 0, end, 1
    while end < len(ids):
        before, end = end, min(end + stride, len(ids))
        yield max(0, end - size), end, before


def windows_of(module: LitEncoder, texts: Sequence[str], size: int, stride: int) -> list[Window]:
    """Cut texts into windows: overlapping ones for CLM, one after the other for MLM; none of a text without tokens."""
    around = affixes(module.tokenizer)
    found = []
    for document, content in enumerate(encode(list(texts), module.tokenizer, num_ids(module.tokenizer))):
        if module.objective == "clm":
            whole = [*around.prefix, *content, *around.suffix]
            for start, end, first in sliding_windows(whole, size, stride):
                found.append(Window(document, tuple(whole[start:end]), first - start))
        else:
            room = size - len(around.prefix) - len(around.suffix)
            for start in range(0, max(len(content), 1), room):
                ids = (*around.prefix, *content[start : start + room], *around.suffix)
                found.append(Window(document, ids, 0))
    return [window for window in found if window.ids]


def check_windows(
    module: LitEncoder, sequence_length: int, stride: int | None, mask_ratio: float, key: str = ""
) -> None:
    """Refuse settings of `language_scores` that are out of their range for a model.

    Args:
        module, sequence_length, stride, mask_ratio: see `language_scores`.
        key: before the settings' names in messages.

    Raises:
        ValueError: naming the setting.
    """
    if module.max_positions is not None and sequence_length > module.max_positions:
        raise ValueError(
            f"{key}sequence_length must be at most the {module.max_positions} positions of '{module.source}', "
            f"got {sequence_length}"
        )
    around = affixes(module.tokenizer)
    special = len(around.prefix) + len(around.suffix)
    if sequence_length < max(2, special + 1):
        raise ValueError(
            f"{key}sequence_length must be at least 2 and above a text's {special} special tokens, "
            f"got {sequence_length}"
        )
    if stride is not None and not 1 <= stride < sequence_length:
        raise ValueError(f"{key}stride must be in [1, {sequence_length - 1}], got {stride}")
    if not 0 < mask_ratio <= 1:
        raise ValueError(f"{key}mask_ratio must be in (0, 1], got {mask_ratio}")


def default_stride(sequence_length: int) -> int:
    """Half of a window: a token is predicted from that many at least, but at a document's beginning."""
    return max(1, sequence_length // 2)


@torch.no_grad()
def language_scores(
    module: LitEncoder,
    texts: Sequence[str],
    *,
    sequence_length: int = 512,
    stride: int | None = None,
    mask_ratio: float = 0.15,
    slots: int = 4096,
) -> Scores:
    """Perplexity and bits per byte of texts, with the objective that the model is for.

    Args:
        module: of the model.
        texts: documents; each is an item.
        sequence_length: longest window in tokens, special ones included.
        stride: of CLM's windows, in [1, sequence_length - 1]; half of a window if not given.
        mask_ratio: of MLM, in (0, 1]; targets are replaced by the mask token, all of them.
        slots: tokens read at once.

    Returns:
        Metrics ``perplexity``, ``loss`` (nats per target) and ``bits_per_byte`` (of UTF-8), all token-weighted; an
        item's points are its bits per byte, with a minus.

    Raises:
        ValueError: a setting is out of its range, or nothing can be predicted.
    """
    check_windows(module, sequence_length, stride, mask_ratio)
    module.configure_model()
    assert module.backbone is not None
    causal = module.objective == "clm"
    windows = windows_of(module, texts, sequence_length, stride or default_stride(sequence_length))
    sums: FloatArray = np.zeros((len(texts), 3))
    device = next(module.backbone.parameters()).device
    was_training = module.backbone.training
    module.backbone.eval()
    try:
        for pack in best_fit(np.array([len(window.ids) for window in windows]), max(slots, sequence_length)):
            chosen = [windows[place] for place in pack]
            sizes = np.array([len(window.ids) for window in chosen], dtype=np.int64)
            ids = torch.tensor([token for window in chosen for token in window.ids], device=device)
            positions = torch.cat([torch.arange(size) for size in sizes.tolist()]).to(device)
            segments = torch.repeat_interleave(torch.arange(len(sizes)), torch.from_numpy(sizes)).to(device)
            if causal:
                firsts = torch.tensor([window.first_target for window in chosen], device=device)
                rows = torch.nonzero(positions >= firsts[segments].clamp_min(1))[:, 0] - 1
                read, labels = ids, ids[rows + 1]
            else:
                read, rows, labels = _masked(module, ids, positions, segments, sizes, pack, mask_ratio)
            group = RowGroup(rows, labels)
            ((_, losses, _),) = module.backbone(read, positions, PackLayout(sizes, causal=causal), [group])
            documents = np.array([window.document for window in chosen])[segments[rows].cpu().numpy()]
            np.add.at(sums[:, 0], documents, losses.double().cpu().numpy())
            np.add.at(sums[:, 1], documents, 1)
    finally:
        module.backbone.train(was_training)
    if not sums[:, 1].any():
        raise ValueError("texts must have tokens to predict, got none")
    around = affixes(module.tokenizer)
    tokens = sums[:, 1].copy()
    if not causal:
        tokens[:] = 0
        for window in windows:
            tokens[window.document] += len(window.ids) - len(around.prefix) - len(around.suffix)
    return _as_scores(sums, texts, tokens)


def _masked(
    module: LitEncoder,
    ids: torch.Tensor,
    positions: torch.Tensor,
    segments: torch.Tensor,
    sizes: np.ndarray[tuple[int], np.dtype[np.int64]],
    pack: Sequence[int],
    mask_ratio: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What MLM reads and predicts in a pack of windows; a window's masks depend on its number alone."""
    module.check_mlm()
    assert module.mask_vocabulary is not None
    vocabulary = module.mask_vocabulary.to(ids.device)
    eligible = torch.zeros(len(sizes), dtype=torch.int64, device=ids.device)
    eligible.index_add_(0, segments, (~vocabulary.special[ids]).long())
    through = eligible.cpu().numpy()
    found = mlm_targets(
        ids,
        segments,
        torch.repeat_interleave(torch.from_numpy(np.cumsum(sizes) - sizes), torch.from_numpy(sizes)).to(ids.device),
        positions,
        np.array(pack, dtype=np.int64),
        np.stack([np.zeros_like(through), through], axis=1),
        vocabulary,
        seed=_MASK_SEED,
        epoch=0,
        mask_ratio=mask_ratio,
        shares=(1.0, 0.0, 0.0),
    )
    return found.input_ids, found.rows, found.labels


def _as_scores(sums: FloatArray, texts: Sequence[str], tokens: FloatArray) -> Scores:
    """Scores out of nats and targets of each document.

    Of MLM only some tokens are predicted: their mean stands for all, so that a byte's share is the mean loss times
    tokens per byte.
    """
    sums[:, 2] = [len(text.encode()) for text in texts]
    counts = np.concatenate([sums, tokens[:, None]], axis=1)

    def loss(total: FloatArray) -> FloatArray:
        return total[..., 0] / np.maximum(total[..., 1], 1)

    def bits_per_byte(total: FloatArray) -> FloatArray:
        return loss(total) * total[..., 3] / np.maximum(total[..., 2], 1) / math.log(2)

    def perplexity(total: FloatArray) -> FloatArray:
        value: FloatArray = np.exp(loss(total))
        return value

    metrics: dict[str, Combine] = {"perplexity": perplexity, "loss": loss, "bits_per_byte": bits_per_byte}
    # By the byte: tokens of two models may be other ones.
    return Scores(counts, metrics, -bits_per_byte(counts), frozenset(metrics))
