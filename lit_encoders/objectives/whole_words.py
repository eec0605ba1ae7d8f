"""Whole-word masking: all pieces of a word are targets, or none.

Source: the whole-word variant that BERT's authors published in 2019 (Devlin et al., arXiv:1810.04805, release notes).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lit_encoders.objectives.hashing import Purpose, document_keys, uniform
from lit_encoders.objectives.masking import (
    IntArray,
    MaskVocabulary,
    Ratio,
    Targets,
    corrupt,
    draw_hashes,
    rank_in_segment,
    spread,
)


def word_starts(input_ids: Tensor, segment_ids: Tensor, eligible: Tensor, continues: Tensor) -> Tensor:
    """Tokens that begin a word, bool (T,): eligible ones that do not continue an eligible token before them.

    Args:
        input_ids: int64 (T,).
        segment_ids: segment of each token, int64 (T,): no word crosses a boundary.
        eligible: tokens that may be masked, bool (T,).
        continues: ids that are written onto the token before, bool (V,).

    >>> ids, same = torch.tensor([0, 5, 6, 5, 5, 6, 6, 0]), torch.zeros(8).long()
    >>> word_starts(ids, same, ids > 0, torch.arange(7) == 6).int().tolist()
    [0, 1, 0, 1, 1, 0, 0, 0]
    """
    joined = torch.zeros_like(eligible)
    joined[1:] = (segment_ids[1:] == segment_ids[:-1]) & eligible[:-1] & continues[input_ids[1:]]
    return eligible & ~joined


def whole_word_targets(
    input_ids: Tensor,
    segment_ids: Tensor,
    segment_starts: Tensor,
    document_positions: Tensor,
    documents: IntArray,
    vocabulary: MaskVocabulary,
    continues: Tensor,
    *,
    seed: int,
    epoch: int,
    mask_ratio: Ratio,
    corruption_ratio: float | None = None,
    shares: tuple[float, float, float] = (0.8, 0.1, 0.1),
) -> Targets:
    """Choose words as `mlm_targets` chooses tokens: floor(ratio * words + u) per piece, by the hash of their start.

    Every word is as likely, whatever its length, so the expected share of tokens is the ratio too. A word is masked,
    replaced or kept as a whole; where it is replaced, each piece gets a random id of its own. The number of targets
    follows from the words, so this runs on the host: all tensors are on the CPU.

    Args:
        input_ids, segment_ids, segment_starts, document_positions, documents, vocabulary: as in `mlm_targets`.
        continues: ids that continue a word, bool (V,).
        seed, epoch, mask_ratio, corruption_ratio, shares: as in `mlm_targets`.
    """
    num_documents = len(documents)
    eligible = ~vocabulary.special[input_ids] & (segment_ids < num_documents)
    starts = word_starts(input_ids, segment_ids, eligible, continues)
    start_slots = starts.nonzero()[:, 0]
    words = torch.cumsum(starts, 0) - 1  # The word of each eligible token.
    num_words = torch.bincount(segment_ids[start_slots], minlength=num_documents)[:num_documents].numpy()
    rounding = uniform(document_keys(seed, epoch, Purpose.ROUNDING, documents))

    def hashes(purpose: Purpose) -> Tensor:
        return draw_hashes(seed, epoch, purpose, documents, segment_ids, document_positions)

    ranks = rank_in_segment(hashes(Purpose.CHOICE), starts, segment_ids, segment_starts)

    def chosen(ratio: Ratio) -> Tensor:
        counts = np.minimum(np.floor(np.round(ratio * num_words, 9) + rounding), num_words).astype(np.int64)
        first = starts & (ranks < spread(torch.from_numpy(counts), segment_ids, num_documents))
        return (eligible & first[start_slots][words.clamp(min=0)]).nonzero()[:, 0] if len(start_slots) else start_slots

    rows = chosen(mask_ratio)
    same = corruption_ratio is None or np.all(corruption_ratio == mask_ratio)
    corrupted = rows if same else chosen(float(corruption_ratio or 0.0))
    written = corrupt(
        input_ids[corrupted],
        hashes(Purpose.ACTION)[start_slots[words[corrupted]]],
        hashes(Purpose.RANDOM_ID)[corrupted],
        shares,
        vocabulary.mask_token_id,
        vocabulary.ordinary_ids,
    )
    counts = torch.bincount(segment_ids[rows], minlength=num_documents)[:num_documents].numpy()
    return Targets(input_ids.index_copy(0, corrupted, written), rows, input_ids[rows], counts)
