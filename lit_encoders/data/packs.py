"""The pack plan: which pieces of which documents stand in which pack, as a pure function of (lengths, seed, epoch).

The packs of all epochs are one endless sequence, planned window by window. A place in it is three integers, so a run
resumes anywhere at the cost of one window's packing.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import override

from lit_encoders.data.tokens import Affixes, StoreMeta
from lit_encoders.objectives.hashing import Purpose, permute, single_key

IntArray = npt.NDArray[np.int64]

WINDOW_DOCUMENTS = 65_536
WINDOW_PACKS = 128
OPEN_PACKS = 256


class Position(NamedTuple):
    """A place in the sequence of packs."""

    epoch: int = 0
    window: int = 0
    pack: int = 0


BEGINNING = Position()


@dataclass(frozen=True)
class Pack:
    """Pieces of documents that stand in one pack, shortest first.

    Attributes:
        documents: index of each piece's document in the store, (N,).
        starts: first content token of each piece in its document, (N,).
        stops: one past its last content token, (N,).
        lengths: tokens of each piece with the special tokens around it, (N,).
        here: the pack's own place, in its source where there are several.
        after: the place that follows the packs of all ranks for this micro-batch; that of a mixture has one for each
            source.
        first_rank: how many pieces stand in the packs before it, in its window of the plan.
        group: the place of the first rank's pack for this micro-batch.
        source: number of the source that its documents are of.
    """

    documents: IntArray
    starts: IntArray
    stops: IntArray
    lengths: IntArray
    here: Position
    after: Any
    first_rank: int = 0
    group: Any = BEGINNING
    source: int = 0

    @property
    def num_tokens(self) -> int:
        """Real tokens."""
        return int(self.lengths.sum())


class Documents(Protocol):
    """What packs are cut from: a `TokenStore`, or several as one."""

    @property
    def meta(self) -> StoreMeta:
        """Figures of all documents."""

    def __len__(self) -> int: ...

    def lengths(self, documents: IntArray) -> IntArray:
        """Content tokens of each document, (N,)."""

    def tokens(self, document: int, start: int, stop: int) -> IntArray:
        """Content ids ``start:stop`` of one document."""

    def num_eligible(self, document: int) -> int:
        """Tokens of a document that are not special ids."""


class Plan(ABC):
    """An endless sequence of packs, of which every place can be named and gone on from.

    Attributes:
        store: the documents.
        affixes: special ids around a document.
        slots: tokens of a pack.
        sequence_length: longest piece of a document.
    """

    store: Documents
    affixes: Affixes
    slots: int
    sequence_length: int

    @property
    @abstractmethod
    def beginning(self) -> Any:
        """The place of the first pack."""

    @abstractmethod
    def placed(self, start: Any = None) -> Iterator[tuple[Any, Pack]]:
        """Yield packs and their places from a place on (None is the beginning), without end."""

    def sequence(self, start: Any = None) -> Iterator[Pack]:
        """Yield packs from a place on (None is the beginning), without end."""
        return (pack for _, pack in self.placed(start))

    @abstractmethod
    def first_packs(self) -> list[Pack]:
        """The packs of the first window, for figures."""

    def epochs_at(self, place: Any) -> float:
        """Passes over the documents at a place."""
        raise NotImplementedError

    @property
    def fill(self) -> float:
        """Share of the slots of the first packs that hold tokens."""
        packs = self.first_packs()
        return sum(pack.num_tokens for pack in packs) / (self.slots * len(packs))

    def for_rank(self, start: Any, rank: int, world_size: int, multiple: int | None = None) -> Iterator[Pack]:
        """Yield every ``world_size``-th pack from ``start + rank`` on, each with the place after all ranks' packs.

        Args:
            start: a place that all ranks share.
            rank: this process, in [0, world_size).
            world_size: number of processes.
            multiple: end with the epoch of ``start``, filled up with empty packs so that every rank gets the same
                number, a multiple of this; without end where None.
        """
        sequence = self.placed(start)
        place, upcoming = next(sequence)
        for count in itertools.count(1):
            group: list[Pack] = []
            first = place
            while len(group) < world_size:
                if multiple is not None and upcoming.here.epoch != start.epoch:
                    group.append(_empty(upcoming.here))
                else:
                    group.append(upcoming)
                    place, upcoming = next(sequence)
            yield replace(group[rank], after=place, group=first)
            if multiple is not None and upcoming.here.epoch != start.epoch and count % multiple == 0:
                return


def best_fit(lengths: IntArray, slots: int, open_packs: int = OPEN_PACKS) -> list[list[int]]:
    """Put pieces into packs: each into the open pack that it fills best, in the order given.

    Args:
        lengths: of the pieces, each in [1, slots], (N,).
        slots: size of a pack.
        open_packs: packs kept open; when one more is needed, the fullest is closed.

    Returns:
        Indices of the pieces of each pack, in order of closing.

    >>> best_fit(np.array([6, 5, 4, 5]), slots=10)
    [[0, 2], [1, 3]]
    """
    packs: list[list[int]] = []
    closed: list[int] = []
    free: list[tuple[int, int]] = []  # (free slots, pack), ascending
    for piece, length in enumerate(lengths.tolist()):
        place = bisect_left(free, (length, -1))
        if place < len(free):
            room, pack = free.pop(place)
        else:
            room, pack = slots, len(packs)
            packs.append([])
        packs[pack].append(piece)
        if room > length:
            insort(free, (room - length, pack))
        else:
            closed.append(pack)
        if len(free) > open_packs:
            closed.append(free.pop(0)[1])
    closed += [pack for _, pack in free]
    return [packs[pack] for pack in closed]


def cut(lengths: IntArray, sequence_length: int, affixes: Affixes) -> tuple[IntArray, IntArray, IntArray]:
    """Cut documents into pieces of at most ``sequence_length`` tokens; nothing is dropped.

    Each piece opens with the tokenizer's prefix; only a document's last piece closes with its suffix, because only
    there the document ends (under CLM the end token is a target).

    Args:
        lengths: content tokens of each document, each at least 1, (D,).
        sequence_length: longest piece, special tokens included.
        affixes: special ids before and after a document.

    Returns:
        For each piece its document's place in ``lengths``, and its first and one past its last content token, (N,).
    """
    room = sequence_length - len(affixes.prefix)
    counts = -(-(lengths + len(affixes.suffix)) // room)
    owners = np.repeat(np.arange(len(lengths)), counts)
    within = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    # A last piece of nothing but the suffix would be no text: it takes its last content token from the piece before.
    totals = lengths[owners]
    starts = np.minimum(within * room, totals - 1)
    last = within == counts[owners] - 1
    stops = np.where(last, totals, np.minimum((within + 1) * room, totals))
    next_starts = np.append(starts[1:], 0)
    stops = np.where(last, stops, np.minimum(stops, next_starts))
    return owners, starts, stops


def pack_window(plan: Plan, documents: IntArray, epoch: int, window: int, seed: int | None) -> list[Pack]:
    """Pack some documents, in the order given.

    Args:
        plan: whose documents they are.
        documents: their numbers, (D,).
        epoch: of the packs' places.
        window: of the packs' places.
        seed: of the order of packs; None leaves them as they close.
    """
    owners, starts, stops = cut(plan.store.lengths(documents), plan.sequence_length, plan.affixes)
    totals = plan.store.lengths(documents)[owners]
    lengths = stops - starts + len(plan.affixes.prefix) + len(plan.affixes.suffix) * (stops == totals)
    packs = best_fit(lengths, plan.slots)
    order = np.arange(len(packs), dtype=np.int64)
    if seed is not None:
        # Packs close fullest first and long documents close at once: without this, like would follow like.
        order = permute(order, len(packs), single_key(seed, Purpose.PACK_ORDER, epoch, window))
    planned: list[Pack] = []
    rank = 0
    for number, place in enumerate(order.tolist()):
        pieces = np.array(packs[place])
        pieces = pieces[np.argsort(lengths[pieces], kind="stable")]
        here = Position(epoch, window, number)
        these = documents[owners[pieces]]
        planned.append(Pack(these, starts[pieces], stops[pieces], lengths[pieces], here, here, rank, here))
        rank += len(pieces)
    return planned


class PackPlan(Plan):
    """The sequence of packs of a corpus.

    Args:
        store: the corpus.
        affixes: special ids around a document.
        slots: tokens of a pack.
        sequence_length: longest piece of a document, at most ``slots``.
        seed: of the order.
        shuffle: whether order changes with the epoch; without it, documents stand in file order.
    """

    def __init__(
        self, store: Documents, affixes: Affixes, slots: int, sequence_length: int, seed: int, shuffle: bool = True
    ) -> None:
        self.store = store
        self.affixes = affixes
        self.slots = slots
        self.sequence_length = sequence_length
        self.seed = seed
        self.shuffle = shuffle
        mean = store.meta.num_tokens / len(store) + len(affixes.prefix) + len(affixes.suffix)
        self.window_documents = max(WINDOW_DOCUMENTS, int(WINDOW_PACKS * slots / mean) + 1)
        self.num_windows = max(1, len(store) // self.window_documents)
        self.window = lru_cache(maxsize=2)(self._plan_window)

    def _plan_window(self, epoch: int, window: int) -> list[Pack]:
        """Plan the packs of one window."""
        first = window * self.window_documents
        last = len(self.store) if window == self.num_windows - 1 else first + self.window_documents
        documents = np.arange(first, last, dtype=np.int64)
        if self.shuffle:
            documents = permute(documents, len(self.store), single_key(self.seed, Purpose.ORDER, epoch))
        return pack_window(self, documents, epoch, window, self.seed if self.shuffle else None)

    def num_packs(self, epoch: int) -> int:
        """Packs of one whole epoch; plans all its windows."""
        return sum(len(self.window(epoch, window)) for window in range(self.num_windows))

    def num_tokens(self) -> int:
        """Tokens of an epoch, special tokens around documents included, those of cuts not."""
        around = len(self.affixes.prefix) + len(self.affixes.suffix)
        return self.store.meta.num_tokens + len(self.store) * around

    @property
    @override
    def beginning(self) -> Position:
        return BEGINNING

    @override
    def first_packs(self) -> list[Pack]:
        return self.window(0, 0)

    @override
    def placed(self, start: Position | None = None) -> Iterator[tuple[Position, Pack]]:
        epoch, window, number = start or Position()
        while True:
            for pack in self.window(epoch, window)[number:]:
                yield pack.here, pack
            number, window = 0, window + 1
            if window == self.num_windows:
                window, epoch = 0, epoch + 1

    @override
    def epochs_at(self, place: Position) -> float:
        """Passes over the documents at a place, a started window counted in full packs."""
        epoch, window, pack = place
        return epoch + (window + pack / len(self.window(epoch, window))) / self.num_windows


def _empty(place: Position) -> Pack:
    nothing = np.empty(0, np.int64)
    return Pack(nothing, nothing, nothing, nothing, place, place)


@dataclass
class PackedBatch:
    """One micro-batch: token ids with document boundaries, and no word of the objective.

    Attributes:
        input_ids: int64 (T,), on the device.
        position_ids: position of each token in its piece, int64 (T,), on the device.
        segment_ids: number of each token's segment, ascending, int64 (T,), on the device; from N on it is padding.
        segment_starts: first slot of each token's segment, int64 (T,), on the device.
        document_positions: position of each token among its document's content tokens, int64 (T,), on the device.
        segment_lengths: tokens of each segment, padding segments included, on the host, (S,).
        documents: document of each real segment, on the host, (N,).
        eligible_span: tokens of its document that may be masked, before each segment and through it, (N, 2).
        here: the pack's place in the plan.
        after: the place to go on from once this batch is trained.
        first_rank: how many pieces stand in the packs before it, in its window of the plan.
        group: the place of the first rank's pack for this micro-batch.
        source: number of the source that its documents are of.
        on_host: this batch before it went to a device, for what has to be decided on the host.
    """

    input_ids: Tensor
    position_ids: Tensor
    segment_ids: Tensor
    segment_starts: Tensor
    document_positions: Tensor
    segment_lengths: IntArray
    documents: IntArray
    eligible_span: IntArray
    here: Position
    after: Any
    first_rank: int = 0
    group: Any = BEGINNING
    source: int = 0
    on_host: PackedBatch | None = None

    @property
    def lengths(self) -> IntArray:
        """Tokens of each real segment, (N,)."""
        return self.segment_lengths[: len(self.documents)]

    @property
    def num_tokens(self) -> int:
        """Real tokens, padding not counted."""
        return int(self.lengths.sum())

    @property
    def counters(self) -> tuple[int, ...]:
        """What names this pack among all packs of a run, for what is drawn anew in each."""
        return (*self.here, self.source) if self.source else tuple(self.here)

    def _tensors(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def to(self, device: torch.device | str, non_blocking: bool = True) -> PackedBatch:
        """Move what the device reads; what the host needs stays."""
        moved = {name: value.to(device, non_blocking=non_blocking) for name, value in self._tensors().items()}
        return replace(self, on_host=self.on_host or self, **moved)

    def pin_memory(self) -> PackedBatch:
        """Pin what the device reads, so that the copy does not hold up the host."""
        return replace(self, **{name: value.pin_memory() for name, value in self._tensors().items()})


def gather(store: Documents, pack: Pack, affixes: Affixes, slots: int, longest: int, pad_id: int) -> PackedBatch:
    """Read a pack's tokens out of the store.

    Args:
        store: the corpus.
        pack: which pieces.
        affixes: special ids around a document.
        slots: size of the pack.
        longest: longest padding segment: the model has no positions beyond.
        pad_id: fills the rest of the pack, as segments of its own that are never eligible.
    """
    rest = slots - int(pack.lengths.sum())
    padding = [longest] * (rest // longest) + ([rest % longest] if rest % longest else [])
    lengths = np.concatenate([pack.lengths, np.array(padding, np.int64)])
    starts = np.cumsum(lengths) - lengths
    input_ids = np.full(slots, pad_id, np.int64)
    prefix = np.array(affixes.prefix, np.int64)
    suffix = np.array(affixes.suffix, np.int64)
    totals = store.lengths(pack.documents)
    for document, start, stop, total, slot in zip(
        *(x.tolist() for x in (pack.documents, pack.starts, pack.stops, totals, starts[: len(totals)])), strict=True
    ):
        parts = [prefix, store.tokens(document, start, stop)] + ([suffix] if stop == total else [])
        piece = np.concatenate(parts)
        input_ids[slot : slot + len(piece)] = piece
    segment_ids = np.repeat(np.arange(len(lengths)), lengths)
    segment_starts = starts[segment_ids]
    position_ids = np.arange(slots) - segment_starts
    shifts = np.zeros(len(lengths), np.int64)
    shifts[: len(totals)] = pack.starts - len(prefix)
    return PackedBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids),
        segment_ids=torch.from_numpy(segment_ids),
        segment_starts=torch.from_numpy(segment_starts),
        document_positions=torch.from_numpy(position_ids + shifts[segment_ids]),
        segment_lengths=lengths,
        documents=pack.documents,
        eligible_span=eligible_spans(store, pack),
        here=pack.here,
        after=pack.after,
        first_rank=pack.first_rank,
        group=pack.group,
        source=pack.source,
    )


def eligible_spans(store: Documents, pack: Pack) -> IntArray:
    """Tokens of its document that may be masked, before each piece of a pack and through its end, (N, 2)."""
    totals = store.lengths(pack.documents)
    rows = zip(*(x.tolist() for x in (pack.documents, pack.starts, pack.stops, totals)), strict=True)
    return np.array([_eligible_span(store, *row) for row in rows], np.int64).reshape(-1, 2)


def _eligible_span(store: Documents, document: int, start: int, stop: int, total: int) -> tuple[int, int]:
    eligible = store.num_eligible(document)
    if eligible == total:
        return start, stop
    if (start, stop) == (0, total):
        return 0, eligible
    # A cut document with special ids in its content: rare, and the only case that has to look.
    ids = store.tokens(document, 0, stop)
    running = np.cumsum(~np.isin(ids, store.meta.special_ids))
    return int(running[start - 1]) if start else 0, int(running[-1])
