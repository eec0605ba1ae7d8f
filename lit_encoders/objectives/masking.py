"""Masked language modelling targets: an exact share of each document's tokens, chosen by a hash.

Corruption and prediction are separate knobs as in "Should you mask 15 %?" (Wettig et al. 2023, arXiv:2202.08005); the
80/10/10 split is BERT's (Devlin et al. 2019, arXiv:1810.04805).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lit_encoders.objectives.hashing import Purpose, document_keys, key_tensor, token_hashes, uniform

IntArray = npt.NDArray[np.int64]
# One mask ratio for all pieces, or one for each.
Ratio = float | npt.NDArray[np.float64]

_HASH_BITS = 40


@dataclass(frozen=True)
class Targets:
    """What a step reads and what it has to predict.

    Attributes:
        input_ids: token ids as the encoder sees them, int64 (T,).
        rows: slots whose output predicts a target, ascending, int64 (K,).
        labels: the id that each row has to predict, int64 (K,).
        counts: targets of each piece, on the host, (N,); needed by streams alone.
    """

    input_ids: Tensor
    rows: Tensor
    labels: Tensor
    counts: IntArray = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def num_targets(self) -> int:
        """K, known on the host without waiting for the device."""
        return len(self.rows)

    def to(self, device: torch.device) -> Targets:
        """The same targets on a device."""
        input_ids, rows, labels = (x.to(device, non_blocking=True) for x in (self.input_ids, self.rows, self.labels))
        return Targets(input_ids, rows, labels, self.counts)


def count_targets(eligible_span: IntArray, ratio: Ratio, rounding: npt.NDArray[np.float64]) -> IntArray:
    """Decide how many eligible tokens of each piece of a document are targets.

    A document with n eligible tokens gets ``floor(ratio * n + u)``: the expectation is exact for documents of any
    length, where rounding would never choose a target in short ones. Pieces of one document share ``u`` and their
    counts add up to the document's.

    Args:
        eligible_span: eligible tokens of the document before the piece, and through its end; (N, 2).
        ratio: share of eligible tokens, in [0, 1]; one for all, or one for each piece, (N,).
        rounding: ``u`` of each piece's document, in [0, 1), (N,).

    Returns:
        Number of targets per piece, (N,).

    >>> count_targets(np.array([[0, 5], [5, 10]]), 0.5, np.array([0.9, 0.9]))
    array([3, 2])
    """
    # Products such as 0.29 * 100 lie a hair below the integer they mean: the last bits are rounded away first.
    through = np.floor(np.round(ratio * eligible_span[:, 1], 9) + rounding)
    before = np.floor(np.round(ratio * eligible_span[:, 0], 9) + rounding)
    # In float64, 100 + (1 - 2^-53) is 101.
    counts: IntArray = np.minimum(through - before, eligible_span[:, 1] - eligible_span[:, 0]).astype(np.int64)
    return counts


def rank_in_segment(hashes: Tensor, eligible: Tensor, segment_ids: Tensor, segment_starts: Tensor) -> Tensor:
    """Rank each eligible token among its segment's by hash, ties by position; int64 (T,).

    One stable sort, because ``topk`` is not stable across devices. Tokens that are not eligible rank last.

    Args:
        hashes: 64 random bits per token, int64 (T,).
        eligible: tokens that may be chosen, bool (T,).
        segment_ids: segment of each token, ascending, int64 (T,).
        segment_starts: first slot of each token's segment, int64 (T,).
    """
    hash40 = (hashes >> (64 - _HASH_BITS)) & ((1 << _HASH_BITS) - 1)
    keys = segment_ids * (1 << (_HASH_BITS + 1)) + torch.where(eligible, hash40, 1 << _HASH_BITS)
    order = torch.sort(keys, stable=True).indices
    slots = torch.arange(len(order), device=order.device)
    ranks = torch.empty_like(order)
    ranks[order] = slots - segment_starts[order]
    return ranks


def corrupt(
    input_ids: Tensor,
    action_hashes: Tensor,
    id_hashes: Tensor,
    shares: tuple[float, float, float],
    mask_token_id: int,
    ordinary_ids: Tensor,
) -> Tensor:
    """Replace tokens by the mask, by a random ordinary token, or by themselves, int64 (K,).

    Args:
        input_ids: the true ids, int64 (K,).
        action_hashes: 64 random bits per token that choose the action, int64 (K,).
        id_hashes: 64 random bits per token that choose the random id, int64 (K,).
        shares: mask, random and keep; they sum to 1.
        mask_token_id: id of the mask token.
        ordinary_ids: ids that a random replacement may take (never special ones), int64 (R,).

    >>> corrupt(torch.tensor([5, 6]), torch.zeros(2).long(), torch.zeros(2).long(), (1., 0., 0.), 3, torch.tensor([5]))
    tensor([3, 3])
    """
    # 53 of the bits against integer thresholds: exact on every device, as no float is compared.
    draw = (action_hashes >> 11) & ((1 << 53) - 1)
    masked = draw < round(shares[0] * 2**53)
    kept = draw >= round((shares[0] + shares[1]) * 2**53)
    random_ids = ordinary_ids[((id_hashes >> 1) & ((1 << 63) - 1)) % len(ordinary_ids)]
    return torch.where(masked, mask_token_id, torch.where(kept, input_ids, random_ids))


@dataclass(frozen=True)
class MaskVocabulary:
    """Which ids masking may touch and write.

    Attributes:
        special: ids that are never targets, bool (V,).
        ordinary_ids: all others that the tokenizer knows, int64 (R,).
        mask_token_id: id written over a masked token.
    """

    special: Tensor
    ordinary_ids: Tensor
    mask_token_id: int

    def to(self, device: torch.device) -> MaskVocabulary:
        """The same vocabulary on a device."""
        return MaskVocabulary(self.special.to(device), self.ordinary_ids.to(device), self.mask_token_id)


def spread(values: Tensor, segment_ids: Tensor, num_documents: int) -> Tensor:
    """Give each token its document's value, (N,) -> (T,); padding segments follow the real ones and read a zero."""
    padded = torch.cat([values, values.new_zeros(1)]).to(segment_ids.device)
    return padded[segment_ids.clamp(max=num_documents)]


def draw_hashes(
    seed: int, epoch: int, purpose: Purpose, documents: IntArray, segment_ids: Tensor, document_positions: Tensor
) -> Tensor:
    """64 random bits per token for a purpose, int64 (T,): a function of (seed, epoch, document, position) alone."""
    keys = key_tensor(document_keys(seed, epoch, purpose, documents))
    return token_hashes(spread(keys, segment_ids, len(documents)), document_positions)


def mlm_targets(
    input_ids: Tensor,
    segment_ids: Tensor,
    segment_starts: Tensor,
    document_positions: Tensor,
    documents: IntArray,
    eligible_span: IntArray,
    vocabulary: MaskVocabulary,
    *,
    seed: int,
    epoch: int,
    mask_ratio: Ratio,
    corruption_ratio: float | None = None,
    shares: tuple[float, float, float] = (0.8, 0.1, 0.1),
) -> Targets:
    """Choose and corrupt the targets of a pack: a pure function of (seed, epoch, document, position in document).

    Args:
        input_ids: the true ids, int64 (T,), on any device; the other tensors on the same.
        segment_ids: segment of each token, ascending, int64 (T,); segments from ``len(documents)`` on are padding.
        segment_starts: first slot of each token's segment, int64 (T,).
        document_positions: position of each token in its document, int64 (T,).
        documents: index of each segment's document, on the host, (N,).
        eligible_span: eligible tokens of its document before each segment and through its end, on the host, (N, 2).
        vocabulary: special ids, ordinary ids and the mask token.
        seed: the run's seed.
        epoch: pass over the data.
        mask_ratio: share of eligible tokens that are targets, in (0, 1]; one for all, or one for each segment, (N,).
        corruption_ratio: share that ``shares`` apply to; ``mask_ratio`` where None. Below it, some targets are
            predicted from their own id; above it, some corrupted tokens are no targets.
        shares: of the corrupted tokens, how many become the mask, a random token, or stay.
    """
    num_documents = len(documents)
    rounding = uniform(document_keys(seed, epoch, Purpose.ROUNDING, documents))

    def per_token(values: Tensor) -> Tensor:
        return spread(values, segment_ids, num_documents)

    def hashes(purpose: Purpose) -> Tensor:
        return draw_hashes(seed, epoch, purpose, documents, segment_ids, document_positions)

    eligible = ~vocabulary.special[input_ids] & (segment_ids < num_documents)
    ranks = rank_in_segment(hashes(Purpose.CHOICE), eligible, segment_ids, segment_starts)

    num_targets = count_targets(eligible_span, mask_ratio, rounding)
    rows = torch.nonzero_static(
        eligible & (ranks < per_token(torch.from_numpy(num_targets))), size=int(num_targets.sum())
    )[:, 0]
    if corruption_ratio is None or np.all(corruption_ratio == mask_ratio):
        corrupted = rows
    else:
        num_corrupted = count_targets(eligible_span, corruption_ratio, rounding)
        corrupted = torch.nonzero_static(
            eligible & (ranks < per_token(torch.from_numpy(num_corrupted))), size=int(num_corrupted.sum())
        )[:, 0]
    written = corrupt(
        input_ids[corrupted],
        hashes(Purpose.ACTION)[corrupted],
        hashes(Purpose.RANDOM_ID)[corrupted],
        shares,
        vocabulary.mask_token_id,
        vocabulary.ordinary_ids,
    )
    return Targets(input_ids.index_copy(0, corrupted, written), rows, input_ids[rows], num_targets)
