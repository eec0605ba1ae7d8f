"""Whole-word masking: all pieces or none, one decision per word, the same share of tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lit_encoders.objectives.masking import MaskVocabulary, Targets
from lit_encoders.objectives.whole_words import whole_word_targets

VOCAB = 60
MASK = 4
SPECIAL = torch.arange(VOCAB) < 5
CONTINUES = torch.arange(VOCAB) >= 40
VOCABULARY = MaskVocabulary(SPECIAL, torch.arange(5, VOCAB), MASK)


def choose(
    documents: list[list[int]], seed: int = 0, epoch: int = 0, ratio: float = 0.3, **settings: object
) -> Targets:
    lengths = torch.tensor([len(d) for d in documents])
    segments = torch.repeat_interleave(torch.arange(len(documents)), lengths)
    starts = (torch.cumsum(lengths, 0) - lengths)[segments]
    ids = torch.tensor([token for d in documents for token in d])
    return whole_word_targets(
        ids, segments, starts, torch.arange(len(ids)) - starts, np.arange(len(documents)), VOCABULARY, CONTINUES,
        seed=seed, epoch=epoch, mask_ratio=ratio, **settings,  # type: ignore[arg-type]
    )  # fmt: skip


def test_m08_all_pieces_of_a_word_or_none() -> None:
    """Words [None, 0, 0, 1, 2, 2, 2, None], 500 maskings: never a part of one, one decision for its pieces."""
    document = [2, 10, 41, 11, 12, 42, 43, 3]
    words = [{1, 2}, {3}, {4, 5, 6}]
    seen: set[frozenset[int]] = set()
    for seed in range(500):
        targets = choose([document], seed=seed)
        rows = set(targets.rows.tolist())
        for word in words:
            assert word <= rows or not word & rows
            masked = {bool(targets.input_ids[slot] == MASK) for slot in word & rows}
            assert len(masked) <= 1
        assert targets.labels.tolist() == [document[row] for row in targets.rows.tolist()]
        untouched = [slot for slot in range(8) if slot not in rows]
        assert targets.input_ids[untouched].tolist() == [document[slot] for slot in untouched]
        seen.add(frozenset(rows))
    assert {frozenset(word) for word in words} <= seen


def test_words_do_not_cross_documents_or_special_tokens() -> None:
    """A continuation at a document's start, or behind a special token, is a word of its own."""
    for seed in range(50):
        rows = set(choose([[10, 41], [42, 11], [10, 1, 43]], seed=seed, ratio=0.5).rows.tolist())
        assert len(rows & {0, 1}) in (0, 2)
        assert 5 not in rows
    apart = [set(choose([[10, 41], [42, 11]], seed=seed, ratio=0.5).rows.tolist()) & {2, 3} for seed in range(50)]
    assert all(rows in ({2}, {3}) for rows in apart)


def test_share_of_tokens_and_of_actions() -> None:
    generator = np.random.default_rng(0)
    documents = [generator.integers(5, VOCAB, size=generator.integers(3, 60)).tolist() for _ in range(8000)]
    targets = choose(documents, ratio=0.15)
    total = sum(map(len, documents))
    assert targets.num_targets / total == pytest.approx(0.15, abs=0.005)
    read, true = targets.input_ids[targets.rows], targets.labels
    assert (read == MASK).float().mean().item() == pytest.approx(0.8, abs=0.02)
    assert (read == true).float().mean().item() == pytest.approx(0.1, abs=0.02)


def test_packing_does_not_matter_and_epochs_do() -> None:
    documents = [[2, 10, 41, 11, 3], [2, 12, 42, 43, 13, 14, 3]]
    together = choose(documents, ratio=0.5)
    alone = choose(documents[:1], ratio=0.5)
    assert [row for row in together.rows.tolist() if row < 5] == alone.rows.tolist()
    draws = {tuple(choose(documents, epoch=epoch, ratio=0.5).rows.tolist()) for epoch in range(20)}
    assert len(draws) > 5


def test_corruption_beside_prediction_and_no_words_at_all() -> None:
    document = [2, *([10, 41] * 10), 3]
    targets = choose([document], ratio=0.5, corruption_ratio=0.2, shares=(1.0, 0.0, 0.0))
    assert targets.num_targets == 10
    changed = (targets.input_ids != torch.tensor(document)).nonzero()[:, 0]
    assert len(changed) == 4
    assert set(changed.tolist()) <= set(targets.rows.tolist())
    assert choose([[2, 3]]).num_targets == 0
