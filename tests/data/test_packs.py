"""The pack plan: every token of every document once an epoch, at a place that three integers name."""

from collections.abc import Callable
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest
import torch

from lit_encoders.data import packs
from lit_encoders.data.packs import Pack, PackPlan, Position, best_fit, cut, gather
from lit_encoders.data.tokens import Affixes, TokenStore, affixes

Make = Callable[..., TokenStore]
AROUND = Affixes((2,), (3,))


def realistic_lengths(count: int) -> np.ndarray:
    """Text lengths are close to log-normal: median 90 tokens, a tail that is cut at 512."""
    return np.clip(np.random.default_rng(0).lognormal(4.5, 0.9, count).astype(np.int64), 3, 512)


# Best fit


def test_best_fit_uses_each_piece_once_and_respects_the_slots() -> None:
    lengths = realistic_lengths(3000)
    placed = best_fit(lengths, slots=512)
    assert sorted(piece for pack in placed for piece in pack) == list(range(3000))
    assert max(int(lengths[pack].sum()) for pack in placed) <= 512


def test_best_fit_fills_packs_of_realistic_lengths() -> None:
    lengths = realistic_lengths(3000)
    placed = best_fit(lengths, slots=512)
    assert len(placed) >= 500
    assert lengths.sum() / (512 * len(placed)) >= 0.98


def test_best_fit_takes_the_tightest_gap() -> None:
    """4 fits behind 5 and behind 6; behind 6 it leaves nothing."""
    assert best_fit(np.array([5, 6, 4]), slots=10) == [[1, 2], [0]]


def test_best_fit_closes_the_fullest_pack_when_too_many_are_open() -> None:
    assert best_fit(np.array([6, 8, 7, 2]), slots=10, open_packs=2) == [[1], [2, 3], [0]]


@pytest.mark.parametrize(("lengths", "placed"), [([], []), ([10], [[0]]), ([10, 10], [[0], [1]])])
def test_best_fit_at_the_edges(lengths: list[int], placed: list[list[int]]) -> None:
    assert best_fit(np.array(lengths, np.int64), slots=10) == placed


# Cuts


@pytest.mark.parametrize(("prefix", "suffix"), [(1, 1), (0, 0), (0, 1), (1, 0), (2, 3), (0, 3)])
def test_cut_loses_nothing_and_makes_no_piece_without_content(prefix: int, suffix: int) -> None:
    around = Affixes((2,) * prefix, (3,) * suffix)
    random = np.random.default_rng(prefix * 10 + suffix)
    for sequence_length in (prefix + suffix + 1, prefix + suffix + 2, 11, 64):
        lengths = np.concatenate([np.arange(1, 200), random.integers(1, 2000, 50)])
        owners, starts, stops = cut(lengths, sequence_length, around)
        for document, length in enumerate(lengths.tolist()):
            mine = owners == document
            bounds = list(zip(starts[mine].tolist(), stops[mine].tolist(), strict=True))
            assert bounds[0][0] == 0
            assert bounds[-1][1] == length
            assert all(start < stop for start, stop in bounds)
            assert all(stop == start for (_, stop), (start, _) in pairwise(bounds))
            sizes = [prefix + stop - start + (suffix if stop == length else 0) for start, stop in bounds]
            assert max(sizes) <= sequence_length
            # The suffix closes the last piece alone, and no more pieces are cut than are needed.
            assert sum(stop == length for _, stop in bounds) == 1
            assert len(bounds) == -(-(length + suffix) // (sequence_length - prefix))


def test_cut_leaves_the_last_piece_a_token_beside_its_suffix() -> None:
    """7 tokens and [SEP] in pieces of 8 with [CLS]: [SEP] does not fit, so it takes the last token along."""
    owners, starts, stops = cut(np.array([7]), 8, AROUND)
    assert (owners.tolist(), starts.tolist(), stops.tolist()) == ([0, 0], [0, 6], [6, 7])
    owners, starts, stops = cut(np.array([6]), 8, AROUND)
    assert (starts.tolist(), stops.tolist()) == ([0], [6])


# The plan


LENGTHS = [1 + (number * 37) % 97 for number in range(203)]


@pytest.fixture
def store(store_of_lengths: Make) -> TokenStore:
    return store_of_lengths(LENGTHS)


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of 40 documents instead of 65,536."""
    monkeypatch.setattr(packs, "WINDOW_DOCUMENTS", 40)
    monkeypatch.setattr(packs, "WINDOW_PACKS", 2)


def make_plan(store: TokenStore, **options: Any) -> PackPlan:
    return PackPlan(store, AROUND, **{"slots": 96, "sequence_length": 32, "seed": 0, **options})


def epoch_packs(plan: PackPlan, epoch: int) -> list[Pack]:
    return [pack for window in range(plan.num_windows) for pack in plan.window(epoch, window)]


def rows(pack: Pack) -> list[tuple[int, int, int]]:
    return list(zip(pack.documents.tolist(), pack.starts.tolist(), pack.stops.tolist(), strict=True))


def places(sequence: Any, count: int) -> list[tuple[Position, list[tuple[int, int, int]]]]:
    return [(pack.here, rows(pack)) for pack in islice(sequence, count)]


WINDOWED = pytest.mark.parametrize("windowed", [False, True], ids=["one window", "five windows"])


@pytest.fixture
def plan(request: pytest.FixtureRequest, store: TokenStore, windowed: bool) -> PackPlan:
    if windowed:
        request.getfixturevalue("small_windows")
    made = make_plan(store)
    assert made.num_windows == (5 if windowed else 1)
    return made


@WINDOWED
@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_epoch_holds_every_token_of_every_document_once(plan: PackPlan, epoch: int) -> None:
    pieces = sorted(row for pack in epoch_packs(plan, epoch) for row in rows(pack))
    by_document: dict[int, list[tuple[int, int]]] = {}
    for document, start, stop in pieces:
        by_document.setdefault(document, []).append((start, stop))
    assert sorted(by_document) == list(range(len(LENGTHS)))
    for document, bounds in by_document.items():
        covered = [token for start, stop in bounds for token in range(start, stop)]
        assert covered == list(range(LENGTHS[document]))


@WINDOWED
def test_packs_hold_at_most_their_slots_shortest_piece_first(plan: PackPlan) -> None:
    for pack in epoch_packs(plan, 0):
        assert 0 < pack.lengths.sum() <= 96
        assert pack.lengths.max() <= 32
        assert (np.diff(pack.lengths) >= 0).all()
        totals = np.array(LENGTHS)[pack.documents]
        assert pack.lengths.tolist() == (1 + pack.stops - pack.starts + (pack.stops == totals)).tolist()


@WINDOWED
def test_order_differs_between_epochs_and_seeds_and_repeats_within(store: TokenStore, plan: PackPlan) -> None:
    def order(of: PackPlan, epoch: int) -> list[Any]:
        return [rows(pack) for pack in epoch_packs(of, epoch)]

    first = order(plan, 0)
    assert first == order(make_plan(store), 0)
    assert len({repr(first), repr(order(plan, 1)), repr(order(make_plan(store, seed=1), 0))}) == 3
    assert sorted(first) != sorted(order(plan, 1))


def test_without_shuffling_documents_stand_in_file_order(store: TokenStore, small_windows: None) -> None:
    plan = make_plan(store, shuffle=False)
    assert [rows(pack) for pack in epoch_packs(plan, 0)] == [rows(pack) for pack in epoch_packs(plan, 3)]
    for window in range(4):
        documents = {document for pack in plan.window(0, window) for document, _, _ in rows(pack)}
        assert documents == set(range(window * 40, window * 40 + 40))


def test_last_window_takes_the_rest(store: TokenStore, small_windows: None) -> None:
    plan = make_plan(store, shuffle=False)
    documents = {document for pack in plan.window(0, 4) for document, _, _ in rows(pack)}
    assert documents == set(range(160, 203))


def test_window_holds_enough_tokens_for_its_packs(store: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short documents in long packs: windows grow beyond their number of documents."""
    monkeypatch.setattr(packs, "WINDOW_DOCUMENTS", 1)
    monkeypatch.setattr(packs, "WINDOW_PACKS", 20)
    plan = make_plan(store)
    assert plan.num_windows > 1
    assert all(len(plan.window(0, window)) >= 18 for window in range(plan.num_windows))


@WINDOWED
def test_sequence_runs_through_the_epochs_without_end(plan: PackPlan) -> None:
    first, second = epoch_packs(plan, 0), epoch_packs(plan, 1)
    assert plan.num_packs(0) == len(first)
    expected = [(pack.here, rows(pack)) for pack in first + second]
    assert places(plan.sequence(), len(expected)) == expected
    assert [here.epoch for here, _ in expected] == [0] * len(first) + [1] * len(second)
    assert len({here for here, _ in expected}) == len(expected)


@WINDOWED
def test_sequence_from_any_place_is_the_tail_of_the_whole(store: TokenStore, plan: PackPlan) -> None:
    count = plan.num_packs(0) + plan.num_packs(1) + 3
    whole = places(plan.sequence(), count)
    for number in (0, 1, 10, plan.num_packs(0) - 1, plan.num_packs(0), plan.num_packs(0) + 4, count - 1):
        fresh = make_plan(store)
        assert places(fresh.sequence(whole[number][0]), count - number) == whole[number:]


@WINDOWED
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_are_dealt_the_same_packs_in_order(plan: PackPlan, world_size: int) -> None:
    steps = (plan.num_packs(0) + 10) // world_size
    whole = places(plan.sequence(), world_size * steps + 1)
    ranks = [list(islice(plan.for_rank(Position(), rank, world_size), steps)) for rank in range(world_size)]
    dealt = [(pack.here, rows(pack)) for group in zip(*ranks, strict=True) for pack in group]
    assert dealt == whole[:-1]
    for step, group in enumerate(zip(*ranks, strict=True)):
        assert {pack.after for pack in group} == {whole[(step + 1) * world_size][0]}


@WINDOWED
def test_run_goes_on_from_the_place_after_any_step_under_another_world_size(plan: PackPlan) -> None:
    whole = places(plan.sequence(), 60)
    stopped = list(islice(plan.for_rank(Position(), 1, 2), 13))[-1].after
    ranks = [list(islice(plan.for_rank(stopped, rank, 4), 8)) for rank in range(4)]
    dealt = [(pack.here, rows(pack)) for group in zip(*ranks, strict=True) for pack in group]
    assert dealt == whole[26 : 26 + 32]


@WINDOWED
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("multiple", [1, 3])
def test_epoch_ends_at_equal_counts_with_empty_packs(plan: PackPlan, world_size: int, multiple: int) -> None:
    start = next(islice(plan.sequence(), 5, None)).here
    total = plan.num_packs(0) - 5
    ranks = [list(plan.for_rank(start, rank, world_size, multiple)) for rank in range(world_size)]
    counts = {len(rank) for rank in ranks}
    group = world_size * multiple
    assert counts == {-(-total // group) * multiple}
    dealt = [pack for step in zip(*ranks, strict=True) for pack in step]
    assert [rows(pack) for pack in dealt[:total]] == [rows(pack) for pack in epoch_packs(plan, 0)[5:]]
    assert all(rows(pack) == [] for pack in dealt[total:])
    assert all(rank[-1].after == Position(1, 0, 0) for rank in ranks)


def test_tokens_of_an_epoch(store: TokenStore) -> None:
    assert make_plan(store).num_tokens() == sum(LENGTHS) + 2 * len(LENGTHS)


# Batches


def pieces_of(store: TokenStore, pack: Pack, around: Affixes) -> list[list[int]]:
    """Written out by hand: prefix, content, and the suffix where the document ends."""
    out = []
    for document, start, stop in rows(pack):
        ends = stop == int(store.lengths(np.array([document]))[0])
        content = store.tokens(document, start, stop).tolist()
        out.append([*around.prefix, *content, *(around.suffix if ends else ())])
    return out


@pytest.mark.parametrize("around", [AROUND, Affixes((), (3,)), Affixes((2, 2), ())])
def test_batch_lays_out_pieces_and_padding(store: TokenStore, around: Affixes) -> None:
    plan = PackPlan(store, around, slots=96, sequence_length=32, seed=0)
    for pack in islice(plan.sequence(), 40):
        pieces = pieces_of(store, pack, around)
        padding = 96 - sum(map(len, pieces))
        # No padding segment is longer than a piece may be: the model has no positions beyond.
        segments = [*map(len, pieces), *[10] * (padding // 10), *([padding % 10] if padding % 10 else [])]
        batch = gather(store, pack, around, slots=96, longest=10, pad_id=0)

        assert batch.input_ids.tolist() == [token for piece in pieces for token in piece] + [0] * padding
        assert batch.segment_lengths.tolist() == segments
        assert batch.lengths.tolist() == pack.lengths.tolist() == [len(piece) for piece in pieces]
        assert batch.num_tokens == 96 - padding
        assert batch.position_ids.tolist() == [place for length in segments for place in range(length)]
        assert batch.segment_ids.tolist() == [n for n, length in enumerate(segments) for _ in range(length)]
        starts = np.cumsum([0, *segments[:-1]]).tolist()
        assert batch.segment_starts.tolist() == [s for s, n in zip(starts, segments, strict=True) for _ in range(n)]
        assert batch.documents.tolist() == pack.documents.tolist()
        assert (batch.here, batch.after) == (pack.here, pack.after)


def test_document_positions_go_on_across_pieces(store: TokenStore) -> None:
    """Content token t of a document has position t in whatever piece it stands: masks hash it."""
    plan = make_plan(store)
    seen: dict[int, dict[int, int]] = {}
    for pack in epoch_packs(plan, 0):
        batch = gather(store, pack, AROUND, 96, 32, 0)
        for segment, (document, start, stop) in enumerate(rows(pack)):
            mine = batch.segment_ids == segment
            positions = batch.document_positions[mine].tolist()
            assert positions == list(range(start - 1, start - 1 + len(positions)))
            content = zip(positions, batch.input_ids[mine].tolist(), strict=True)
            seen.setdefault(document, {}).update((p, t) for p, t in content if start <= p < stop)
    assert len(seen) == len(LENGTHS)
    for document, tokens in seen.items():
        expected = store.tokens(document, 0, LENGTHS[document]).tolist()
        assert [tokens[place] for place in range(LENGTHS[document])] == expected


def test_eligible_span_counts_without_special_ids_across_pieces(make_store: Make, tokenizer: Any) -> None:
    """An unknown word is a special id: the host has to know without looking on the device."""
    texts = [
        " ".join("strange" if place % (document + 2) == 0 else f"w{place % 90}" for place in range(70 + document))
        for document in range(6)
    ] + ["w1 w2 w3", "strange", " ".join(["strange"] * 50), "w1 strange " * 25]
    store = make_store(texts)
    around = affixes(tokenizer)
    plan = PackPlan(store, around, slots=64, sequence_length=16, seed=0)
    special = torch.zeros(95, dtype=torch.bool)
    special[tokenizer.all_special_ids] = True
    cut_documents = set()
    for pack in epoch_packs(plan, 0):
        batch = gather(store, pack, around, 64, 16, 0)
        for segment, (document, start, stop) in enumerate(rows(pack)):
            known = [word != "strange" for word in texts[document].split()]
            assert batch.eligible_span[segment].tolist() == [sum(known[:start]), sum(known[:stop])]
            on_device = (~special[batch.input_ids[batch.segment_ids == segment]]).sum().item()
            assert on_device == sum(known[start:stop])
            if start:
                cut_documents.add(document)
    assert cut_documents == {0, 1, 2, 3, 4, 5, 8, 9}


def test_empty_pack_is_padding_alone(store: TokenStore) -> None:
    plan = make_plan(store)
    empty = list(plan.for_rank(Position(), 0, 1, multiple=plan.num_packs(0) + 1))[-1]
    batch = gather(store, empty, AROUND, 96, 32, pad_id=7)
    assert batch.input_ids.tolist() == [7] * 96
    assert batch.segment_lengths.tolist() == [32, 32, 32]
    assert batch.num_tokens == 0
    assert batch.eligible_span.shape == (0, 2)


def test_full_pack_has_no_padding_segment(store_of_lengths: Make) -> None:
    store = store_of_lengths([30, 30])
    pack = next(make_plan(store, slots=64).sequence())
    batch = gather(store, pack, AROUND, 64, 32, 0)
    assert batch.segment_lengths.tolist() == [32, 32]


def test_batch_moves_what_the_device_reads_and_keeps_the_rest(store: TokenStore) -> None:
    batch = gather(store, next(make_plan(store).sequence()), AROUND, 96, 32, 0)
    moved = batch.to("meta")
    names = ("input_ids", "position_ids", "segment_ids", "segment_starts", "document_positions")
    assert all(getattr(moved, name).device.type == "meta" for name in names)
    assert all(getattr(batch, name).device.type == "cpu" for name in names)
    assert moved.segment_lengths is batch.segment_lengths
    assert moved.eligible_span is batch.eligible_span
    assert moved.here == batch.here
