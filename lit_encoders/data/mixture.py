"""Several sources as one sequence of packs, each with its share of the tokens.

A pack holds documents of one source. Which source is next follows from the tokens that each has given so far, so that
shares are met to within a pack at any time; a place in the mixture is a place in every source and those numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from typing_extensions import override

from lit_encoders.data.packs import Documents, IntArray, Pack, Plan, Position
from lit_encoders.data.tokens import StoreMeta

# More than a source has documents: so their numbers, and with them masks, do not hang on the sizes of other sources.
SOURCE_BITS = 40


class MixedPosition(NamedTuple):
    """A place in a mixture.

    Attributes:
        places: in each source.
        tokens: that each source has given before it.
    """

    places: tuple[Position, ...]
    tokens: tuple[int, ...]


def next_source(tokens: Sequence[int], weights: Sequence[float]) -> int:
    """The source that is furthest behind its share; of equals the first.

    Args:
        tokens: that each source has given.
        weights: of the sources, above 0.

    >>> next_source([70, 20], [0.7, 0.3]), next_source([70, 30], [0.7, 0.3])
    (1, 0)
    """
    behind = [given / weight for given, weight in zip(tokens, weights, strict=True)]
    return behind.index(min(behind))


@dataclass(frozen=True)
class JoinedStores:
    """Several stores as one; a document's number is that in its store plus ``source << SOURCE_BITS``.

    Attributes:
        stores: of the same tokenizer.
    """

    stores: tuple[Documents, ...]

    @property
    def meta(self) -> StoreMeta:
        """Figures over all stores."""
        first = self.stores[0].meta
        sums = {
            name: sum(getattr(store.meta, name) for store in self.stores)
            for name in ("num_documents", "num_tokens", "num_eligible", "num_characters", "num_literal_specials")
        }
        return replace(first, **sums)

    def __len__(self) -> int:
        return sum(len(store) for store in self.stores)

    def lengths(self, documents: IntArray) -> IntArray:
        """Content tokens of each document, (N,)."""
        found = np.empty(len(documents), np.int64)
        for number, store in enumerate(self.stores):
            of_store = documents >> SOURCE_BITS == number
            found[of_store] = store.lengths(documents[of_store] - (number << SOURCE_BITS))
        return found

    def tokens(self, document: int, start: int, stop: int) -> IntArray:
        """Content ids ``start:stop`` of one document."""
        source = document >> SOURCE_BITS
        return self.stores[source].tokens(document - (source << SOURCE_BITS), start, stop)

    def num_eligible(self, document: int) -> int:
        """Tokens of a document that are not special ids."""
        source = document >> SOURCE_BITS
        return self.stores[source].num_eligible(document - (source << SOURCE_BITS))


class MixedPlan(Plan):
    """The sequence of packs of several sources.

    Each source is read in epochs of its own: every document once before any of it a second time.

    Args:
        plans: of the sources; with the same slots, lengths and affixes.
        weights: share of each in the tokens, above 0; they need not sum to 1.
    """

    def __init__(self, plans: Mapping[str, Plan], weights: Sequence[float]) -> None:
        self.plans = list(plans.values())
        self.weights = list(weights)
        first = self.plans[0]
        self.affixes, self.slots, self.sequence_length = first.affixes, first.slots, first.sequence_length
        self.store = JoinedStores(tuple(plan.store for plan in self.plans))

    @property
    @override
    def beginning(self) -> MixedPosition:
        return MixedPosition(tuple(plan.beginning for plan in self.plans), (0,) * len(self.plans))

    def _of(self, source: int, pack: Pack) -> Pack:
        """A source's pack with documents numbered over all sources."""
        return replace(pack, documents=pack.documents + (source << SOURCE_BITS), source=source)

    @override
    def first_packs(self) -> list[Pack]:
        return [self._of(source, pack) for source, plan in enumerate(self.plans) for pack in plan.first_packs()]

    @override
    def placed(self, start: MixedPosition | None = None) -> Iterator[tuple[MixedPosition, Pack]]:
        places, given = start or self.beginning
        tokens = list(given)
        sequences = [plan.placed(place) for plan, place in zip(self.plans, places, strict=True)]
        upcoming = [next(sequence) for sequence in sequences]
        while True:
            source = next_source(tokens, self.weights)
            place = MixedPosition(tuple(here for here, _ in upcoming), tuple(tokens))
            yield place, self._of(source, upcoming[source][1])
            tokens[source] += upcoming[source][1].num_tokens
            upcoming[source] = next(sequences[source])
