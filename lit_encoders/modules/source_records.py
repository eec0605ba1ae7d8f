"""What is logged and recorded of each source of a mixture: its tokens, and the losses of its packs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor


def source_terms(
    terms: Mapping[str, tuple[Tensor, int]], names: Sequence[str], source: int
) -> dict[str, tuple[Tensor, int]]:
    """The losses of a micro-batch as those of its source; nothing for the others, so that all ranks log the same names.

    Args:
        terms: sums in nats and numbers of targets, by name, those over all targets first.
        names: of the sources; none where there is one without a name.
        source: number of the micro-batch's.

    Returns:
        ``<source>/mlm_loss`` and the like.
    """
    whole = {name: term for name, term in terms.items() if "/" not in name}
    return {
        f"{of}/{name}": (total, count) if number == source else (total.new_zeros(()), 0)
        for number, of in enumerate(names)
        for name, (total, count) in whole.items()
    }


def source_counts(num_tokens: int, names: Sequence[str], source: int) -> dict[str, int]:
    """Tokens of a micro-batch, by source.

    >>> source_counts(7, ["wiki", "code"], 1)
    {'wiki/tokens': 0, 'code/tokens': 7}
    """
    return {f"{name}/tokens": num_tokens if number == source else 0 for number, name in enumerate(names)}


def source_records(names: Sequence[str], totals: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Tokens of each source over a run, for its summary; empty without named sources.

    >>> source_records(["wiki"], {"wiki/tokens": 9})
    {'sources': {'wiki': 9}}
    """
    return {"sources": {name: totals[f"{name}/tokens"] for name in names}} if names else {}
