"""Masking: counts in closed form, the choice against pure Python, shares against their names."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor
from typing import Any

import numpy as np
import pytest
import torch

from lit_encoders.objectives.hashing import Purpose
from lit_encoders.objectives.masking import (
    MaskVocabulary,
    Targets,
    corrupt,
    count_targets,
    mlm_targets,
    rank_in_segment,
)

PAD, UNK, CLS, SEP, MASK = range(5)
VOCAB_SIZE = 95
UNUSED = (93, 94)  # Rows of a padded embedding matrix that the tokenizer does not know.
GOLDEN = 0x9E3779B97F4A7C15


def vocabulary() -> MaskVocabulary:
    special = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    special[:5] = True
    return MaskVocabulary(special, torch.arange(5, UNUSED[0]), MASK)


@dataclass(frozen=True)
class Piece:
    """A stretch of a document: its ids, where they start in the document, eligible tokens before it."""

    document: int
    ids: list[int]
    start: int = 0
    eligible_before: int = 0

    @property
    def eligible(self) -> int:
        return sum(token >= 5 for token in self.ids)


def words(count: int, document: int = 0) -> list[int]:
    return [5 + (document * 31 + place * 7) % 88 for place in range(count)]


def choose(pieces: Sequence[Piece], padding: int = 0, **options: Any) -> Targets:
    """Run `mlm_targets` on pieces side by side, with a padding segment behind."""
    lengths = torch.tensor([len(piece.ids) for piece in pieces] + [padding] * (padding > 0))
    ids = torch.tensor([token for piece in pieces for token in piece.ids] + [PAD] * padding)
    starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    shifts = torch.tensor([piece.start for piece in pieces] + [0] * (padding > 0))
    settings = {"seed": 0, "epoch": 0, "mask_ratio": 0.3, **options}
    return mlm_targets(
        ids,
        torch.repeat_interleave(torch.arange(len(lengths)), lengths),
        starts,
        torch.arange(len(ids)) - starts + torch.repeat_interleave(shifts, lengths),
        np.array([piece.document for piece in pieces], np.int64),
        np.array([[p.eligible_before, p.eligible_before + p.eligible] for p in pieces], np.int64).reshape(-1, 2),
        vocabulary(),
        **settings,
    )


def by_place(pieces: Sequence[Piece], targets: Targets) -> dict[tuple[int, int], tuple[int, int]]:
    """(document, position in document) -> (label, id that the encoder reads)."""
    places = [(piece.document, piece.start + offset) for piece in pieces for offset in range(len(piece.ids))]
    return {
        places[row]: (label, int(targets.input_ids[row]))
        for row, label in zip(targets.rows.tolist(), targets.labels.tolist(), strict=True)
    }


# Counts


def test_count_is_the_floor_of_the_share_plus_the_draw() -> None:
    draws = np.array([0.0, 0.29, 0.31, 0.99])
    eligible = np.array([[0, 9]] * 4)
    assert count_targets(eligible, 0.3, draws).tolist() == [2, 2, 3, 3]  # 2.7 + u


@pytest.mark.parametrize("ratio", ["0.05", "0.15", "0.29", "0.3", "0.57", "1.0"])
def test_count_equals_exact_fractions(ratio: str) -> None:
    """In float64 0.29 x 100 is 28.999999999999996."""
    for draw in (Fraction(0), Fraction(1, 7), Fraction(1, 2), Fraction(999, 1000)):
        lengths = np.arange(2000)
        counts = count_targets(np.stack([0 * lengths, lengths], 1), float(ratio), np.full(2000, float(draw)))
        assert counts.tolist() == [floor(Fraction(ratio) * length + draw) for length in range(2000)]


@pytest.mark.parametrize(("ratio", "count"), [(0.05, 5), (0.5, 50)])
def test_whole_products_leave_nothing_to_the_draw(ratio: float, count: int) -> None:
    draws = np.append(np.linspace(0, 1, 10_000, endpoint=False), 1 - 2.0**-40)
    assert set(count_targets(np.tile([0, 100], (10_001, 1)), ratio, draws).tolist()) == {count}


def test_pieces_add_up_to_their_document() -> None:
    random = np.random.default_rng(0)
    for _ in range(300):
        cuts = np.sort(random.integers(0, 500, 4))
        bounds = np.array([0, *cuts, 500])
        ratio, draw = random.uniform(), random.uniform()
        pieces = count_targets(np.stack([bounds[:-1], bounds[1:]], 1), ratio, np.full(5, draw))
        assert pieces.sum() == count_targets(np.array([[0, 500]]), ratio, np.array([draw]))[0]
        assert (pieces <= np.diff(bounds)).all()


def test_expectation_is_exact_in_short_documents() -> None:
    """Rounding 0.15 x 3 would never choose a target in a document of three tokens."""
    pieces = [Piece(document, words(3, document)) for document in range(40_000)]
    assert choose(pieces, mask_ratio=0.15).num_targets / 120_000 == pytest.approx(0.15, abs=0.01)


def test_each_document_gets_its_own_count() -> None:
    pieces = [Piece(document, words(100, document)) for document in range(20)]
    rows = choose(pieces, padding=50, mask_ratio=0.05).rows
    assert torch.bincount(rows // 100, minlength=20).tolist() == [5] * 20


def test_ratio_one_masks_all_that_is_eligible() -> None:
    pieces = [Piece(0, [CLS, *words(7), SEP]), Piece(1, [CLS, 9, UNK, 10, SEP])]
    targets = choose(pieces, padding=3, mask_ratio=1.0, shares=(1.0, 0.0, 0.0))
    assert targets.rows.tolist() == [1, 2, 3, 4, 5, 6, 7, 10, 12]
    assert targets.labels.tolist() == [*words(7), 9, 10]
    assert targets.input_ids[targets.rows].tolist() == [MASK] * 9


def test_m01_no_eligible_token_means_no_target() -> None:
    pieces = [Piece(0, [CLS, SEP]), Piece(1, [CLS, UNK, UNK, SEP]), Piece(2, [CLS, *words(4), SEP])]
    targets = choose(pieces, mask_ratio=0.5)
    assert targets.num_targets == 2
    assert targets.rows.min() > 6
    nothing = choose(pieces[:2], padding=4, mask_ratio=0.9)
    assert (nothing.num_targets, nothing.rows.shape, nothing.labels.shape) == (0, (0,), (0,))


def test_pack_of_padding_alone_has_no_target() -> None:
    targets = choose([], padding=6, mask_ratio=0.9)
    assert targets.num_targets == 0
    assert targets.input_ids.tolist() == [PAD] * 6


# Which tokens


def test_m02_special_and_padding_positions_are_never_targets() -> None:
    """One row [CLS] x x [SEP] [CLS] y y y [SEP] PAD PAD, 1,000 maskings at one half."""
    pieces = [Piece(0, [CLS, 10, 11, SEP]), Piece(1, [CLS, 20, 21, 22, SEP])]
    row = torch.tensor([CLS, 10, 11, SEP, CLS, 20, 21, 22, SEP, PAD, PAD])
    guarded = row < 5
    hits = torch.zeros(11)
    for epoch in range(1000):
        targets = choose(pieces, padding=2, epoch=epoch, mask_ratio=0.5)
        assert torch.equal(targets.input_ids[guarded], row[guarded])
        assert torch.equal(targets.labels, row[targets.rows])
        hits[targets.rows] += 1
    assert hits[guarded].sum() == 0
    # Of the eligible tokens, one half: 500 +- 4 standard deviations each.
    assert ((hits[~guarded] - 500).abs() < 64).all()
    assert hits.sum() / 5000 == pytest.approx(0.5, abs=0.02)


def test_m02_documents_packed_as_one_segment_keep_their_inner_specials() -> None:
    """The id decides, not the place: specials in the middle of a segment are as safe."""
    row = [CLS, 10, 11, SEP, CLS, 20, 21, 22, SEP]
    for epoch in range(200):
        targets = choose([Piece(0, row)], epoch=epoch, mask_ratio=1.0)
        assert targets.rows.tolist() == [1, 2, 5, 6, 7]


def test_m02_padding_is_never_a_target_where_its_id_is_an_ordinary_one() -> None:
    """A tokenizer with neither padding nor end token pads with id 0, whatever that is."""
    words_only = MaskVocabulary(torch.zeros(VOCAB_SIZE, dtype=torch.bool), torch.arange(5, 93), MASK)
    ids, segments = torch.tensor([7, 8, 9, PAD, PAD]), torch.tensor([0, 0, 0, 1, 1])
    starts, places = torch.tensor([0, 0, 0, 3, 3]), torch.tensor([0, 1, 2, 0, 1])
    facts = (ids, segments, starts, places, np.array([4]), np.array([[0, 3]]), words_only)
    assert mlm_targets(*facts, seed=0, epoch=0, mask_ratio=1.0).rows.tolist() == [0, 1, 2]


def test_m02_ratio_is_of_eligible_tokens() -> None:
    """Eligible tokens are counted, not slots: 10 words among 90 special ids at 50 % give 5 targets."""
    ids = [UNK] * 45 + words(10) + [UNK] * 45
    assert {choose([Piece(0, ids)], epoch=epoch, mask_ratio=0.5).num_targets for epoch in range(50)} == {5}


def mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
    return value ^ (value >> 31)


def token_hash(seed: int, epoch: int, purpose: Purpose, document: int, position: int) -> int:
    key = mix(mix(mix(seed) ^ epoch) ^ purpose) ^ document
    return mix((key + position * GOLDEN) % 2**64)


def reference(
    piece: Piece, seed: int, epoch: int, ratio: float, corruption: float
) -> dict[tuple[int, int], tuple[int, int]]:
    """One document at a time, in Python integers: sort by 40 bits, then position; take k; act on 80/10/10."""
    key = mix(mix(mix(seed) ^ epoch) ^ Purpose.ROUNDING) ^ piece.document
    draw = (mix((key + GOLDEN) % 2**64) >> 11) / 2**53
    before, through = piece.eligible_before, piece.eligible_before + piece.eligible
    facts = (seed, epoch)
    places = [piece.start + offset for offset, token in enumerate(piece.ids) if token >= 5]
    places.sort(key=lambda place: (token_hash(*facts, Purpose.CHOICE, piece.document, place) >> 24, place))

    def chosen(share: float) -> list[int]:
        exact = Fraction(str(share))
        return places[: floor(exact * through + Fraction(draw)) - floor(exact * before + Fraction(draw))]

    def read(place: int) -> int:
        token = piece.ids[place - piece.start]
        if place not in chosen(corruption):
            return token
        action = (token_hash(*facts, Purpose.ACTION, piece.document, place) >> 11) / 2**53
        number = token_hash(*facts, Purpose.RANDOM_ID, piece.document, place) >> 1
        return MASK if action < 0.8 else 5 + number % 88 if action < 0.9 else token

    return {(piece.document, place): (piece.ids[place - piece.start], read(place)) for place in chosen(ratio)}


@pytest.mark.parametrize(("ratio", "corruption"), [(0.3, None), (0.4, 0.15), (0.15, 0.4), (0.05, None)])
def test_choice_and_replacement_equal_a_loop_in_python(ratio: float, corruption: float | None) -> None:
    pieces = [
        Piece(7, [CLS, *words(1, 7), SEP], start=-1),
        Piece(10**12, [CLS, *words(3, 2)[:2], UNK, *words(3, 3), SEP], start=-1),
        Piece(3, [CLS, *words(60, 3)], start=-1),
        Piece(3, [CLS, *words(55, 4), SEP], start=59, eligible_before=60),
        Piece(0, [CLS, *words(200, 0), SEP], start=-1),
    ]
    for seed, epoch in ((0, 0), (12, 3), (2**63 + 5, 1)):
        targets = choose(pieces, 9, seed=seed, epoch=epoch, mask_ratio=ratio, corruption_ratio=corruption)
        expected: dict[tuple[int, int], tuple[int, int]] = {}
        for piece in pieces:
            expected |= reference(piece, seed, epoch, ratio, ratio if corruption is None else corruption)
        assert by_place(pieces, targets) == expected
        assert targets.rows.tolist() == sorted(targets.rows.tolist())


def test_equal_hashes_go_by_position() -> None:
    segments = torch.tensor([0, 0, 0, 0, 1, 1, 1])
    starts = torch.tensor([0, 0, 0, 0, 4, 4, 4])
    eligible = torch.tensor([True, False, True, True, True, True, False])
    hashes = torch.tensor([9, 1, 9, 2, 5, 5, 5]) << 24
    assert rank_in_segment(hashes, eligible, segments, starts).tolist() == [1, 3, 2, 0, 0, 1, 2]


def test_ties_go_by_position_in_long_documents_too() -> None:
    """An unstable sort keeps a handful of equal keys in order, not a thousand."""
    zeros = torch.zeros(1000, dtype=torch.int64)
    ranks = rank_in_segment(zeros, torch.ones(1000, dtype=torch.bool), zeros, zeros)
    assert ranks.tolist() == list(range(1000))


def test_hashes_are_ordered_as_unsigned_numbers() -> None:
    """The top bit is the sign of an int64: a negative hash is a large one."""
    hashes, zeros = torch.tensor([-1, 2**62]), torch.zeros(2, dtype=torch.int64)
    assert rank_in_segment(hashes, torch.tensor([True, True]), zeros, zeros).tolist() == [1, 0]


# What a mask depends on


def corpus(count: int = 30) -> list[Piece]:
    return [Piece(document, [CLS, *words(3 + document * 2, document), SEP], start=-1) for document in range(count)]


def test_masks_do_not_depend_on_packing() -> None:
    pieces = corpus()
    together = by_place(pieces, choose(pieces))
    backwards = by_place(pieces[::-1], choose(pieces[::-1], padding=17))
    alone: dict[tuple[int, int], tuple[int, int]] = {}
    for first in range(0, 30, 7):
        few = pieces[first : first + 7]
        alone |= by_place(few, choose(few, padding=first))
    assert together == backwards == alone
    assert len(together) > 200


def test_split_documents_keep_count_and_replacements() -> None:
    """Hashes count positions in the document, so a token corrupted under two cuts reads alike under both."""
    ids = words(400)
    whole = [Piece(5, ids)]
    for cut in (1, 100, 257):
        pieces = [Piece(5, ids[:cut]), Piece(5, ids[cut:], start=cut, eligible_before=cut)]
        one, two = by_place(whole, choose(whole)), by_place(pieces, choose(pieces))
        assert len(one) == len(two) == 120
        shared = one.keys() & two.keys()
        assert len(shared) > 80
        assert all(one[place] == two[place] for place in shared)


def test_pieces_of_a_document_are_masked_unlike_each_other() -> None:
    ids = words(50)
    pieces = [Piece(0, ids), Piece(0, ids, start=50, eligible_before=50)]
    places = by_place(pieces, choose(pieces)).keys()
    assert {place for _, place in places if place < 50} != {place - 50 for _, place in places if place >= 50}


def test_equal_texts_are_masked_unlike_each_other() -> None:
    pieces = [Piece(document, words(50)) for document in (0, 1)]
    places = by_place(pieces, choose(pieces)).keys()
    assert {place for document, place in places if document == 0} != {p for d, p in places if d == 1}


def test_m09_masks_differ_between_epochs_and_seeds_and_repeat_within() -> None:
    pieces = corpus()
    first = by_place(pieces, choose(pieces))
    assert first == by_place(pieces, choose(pieces))
    for other in ({"epoch": 1}, {"seed": 1}):
        second = by_place(pieces, choose(pieces, **other))
        # Independent masks at 30 % share 30 % of their targets.
        assert len(first.keys() & second.keys()) / len(first) == pytest.approx(0.3, abs=0.1)


def test_every_position_is_chosen_alike() -> None:
    pieces = [Piece(document, words(20, document)) for document in range(5000)]
    hits = torch.bincount(choose(pieces).rows % 20, minlength=20)
    expected = 5000 * 0.3
    assert hits.sum() == 20 * expected
    assert ((hits - expected) ** 2 / expected).sum() < 43.8  # 99.9 %, 19 degrees of freedom


# What is written


def large() -> list[Piece]:
    return [Piece(document, [CLS, *words(500, document), SEP], start=-1) for document in range(400)]


def test_m05_default_shares_are_80_10_10() -> None:
    targets = choose(large(), mask_ratio=0.5)
    written = targets.input_ids[targets.rows]
    total = targets.num_targets
    assert total == 100_000
    masked, kept = (written == MASK).sum() / total, (written == targets.labels).sum() / total
    assert masked.item() == pytest.approx(0.8, abs=0.01)
    # A random id hits the true one once in 88 times.
    assert kept.item() == pytest.approx(0.1 + 0.1 / 88, abs=0.01)
    assert 1 - masked.item() - kept.item() == pytest.approx(0.1 - 0.1 / 88, abs=0.01)


def test_m05_other_shares_are_exact() -> None:
    pieces = large()[:100]
    masked, random, kept = (
        choose(pieces, shares=shares) for shares in ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
    )
    assert (masked.input_ids[masked.rows] == MASK).all()
    assert torch.equal(kept.input_ids[kept.rows], kept.labels)
    written = random.input_ids[random.rows]
    assert not (written == MASK).any()
    assert (written == random.labels).float().mean().item() == pytest.approx(1 / 88, abs=0.01)
    assert torch.equal(masked.rows, random.rows)


def test_m05_random_ids_are_even_over_ordinary_ids_and_never_special() -> None:
    targets = choose(large(), mask_ratio=0.5, shares=(0.0, 1.0, 0.0))
    counts = torch.bincount(targets.input_ids[targets.rows], minlength=VOCAB_SIZE)
    assert counts[:5].sum() == 0
    assert counts[list(UNUSED)].sum() == 0
    expected = targets.num_targets / 88
    assert ((counts[5:93] - expected) ** 2 / expected).sum() < 133.5  # 99.9 %, 87 degrees of freedom


def test_action_thresholds_are_exact() -> None:
    """53 bits of the hash against the share: a half splits at the bit, with nothing between."""
    draws = torch.tensor([0, 2**52 - 1, 2**52, 2**53 - 1]) << 11
    written = corrupt(torch.full((4,), 9), draws, torch.zeros(4).long(), (0.5, 0.0, 0.5), MASK, torch.tensor([7]))
    assert written.tolist() == [MASK, MASK, 9, 9]
    written = corrupt(torch.full((4,), 9), draws, torch.zeros(4).long(), (0.5, 0.5, 0.0), MASK, torch.tensor([7]))
    assert written.tolist() == [MASK, MASK, 7, 7]


def test_what_is_no_target_is_read_as_it_is() -> None:
    pieces = corpus()
    targets = choose(pieces, padding=5)
    truth = torch.tensor([token for piece in pieces for token in piece.ids] + [PAD] * 5)
    untouched = torch.ones(len(truth), dtype=torch.bool)
    untouched[targets.rows] = False
    assert torch.equal(targets.input_ids[untouched], truth[untouched])
    assert torch.equal(targets.labels, truth[targets.rows])


def changed(pieces: Sequence[Piece], targets: Targets) -> set[int]:
    truth = torch.tensor([token for piece in pieces for token in piece.ids])
    return set((targets.input_ids != truth).nonzero()[:, 0].tolist())


def test_corruption_below_the_mask_ratio_leaves_targets_to_copy() -> None:
    pieces = [Piece(document, words(100, document)) for document in range(50)]
    targets = choose(pieces, mask_ratio=0.4, corruption_ratio=0.15, shares=(1.0, 0.0, 0.0))
    assert targets.num_targets == 50 * 40
    corrupted = changed(pieces, targets)
    assert len(corrupted) == 50 * 15
    assert corrupted < set(targets.rows.tolist())


def test_corruption_above_the_mask_ratio_leaves_corrupted_tokens_unasked() -> None:
    pieces = [Piece(document, words(100, document)) for document in range(50)]
    targets = choose(pieces, mask_ratio=0.15, corruption_ratio=0.4, shares=(1.0, 0.0, 0.0))
    assert targets.num_targets == 50 * 15
    corrupted = changed(pieces, targets)
    assert len(corrupted) == 50 * 40
    assert corrupted > set(targets.rows.tolist())


def test_no_corruption_at_all_masks_nothing() -> None:
    pieces = corpus()
    targets = choose(pieces, corruption_ratio=0.0)
    assert changed(pieces, targets) == set()
    assert torch.equal(targets.rows, choose(pieces).rows)
