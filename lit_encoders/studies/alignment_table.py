"""From losses to the cells of the alignment study's table: pure functions.

Rows are strategies; columns are what was learnt (trained languages), what was kept (the general one) and what came
along (unseen relatives).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, get_args

from lit_encoders.evaluation.statistics import Interval, t_interval

Column = Literal["trained", "general", "unseen"]
# Model -> language -> held-out loss, in nats per target.
ModelLosses = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Family:
    """Languages that are close to each other.

    Attributes:
        name: of the family.
        trained: languages that its runs train on.
        unseen: relatives that no run sees.
    """

    name: str
    trained: tuple[str, ...]
    unseen: tuple[str, ...]

    @property
    def languages(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.trained, *self.unseen)


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        title: in the table.
        models: name of the model that stands for a family, which ``{family}`` is put into.
        baseline: title of the row that the strategy is an answer to; "" for a baseline itself.
    """

    title: str
    models: str
    baseline: str = ""

    def model(self, family: Family) -> str:
        """Name of the model that stands for a family."""
        return self.models.format(family=family.name)


ROWS = (
    Row("dense CPT", "dense"),
    Row("family experts", "expert-{family}"),
    Row("layer freezing", "freezing-{family}", "family experts"),
    Row("layer-range L2-SP", "l2sp-{family}", "family experts"),
    Row("dense-reverted", "dense-reverted", "dense CPT"),
    Row("expert-reverted", "expert-reverted-{family}", "family experts"),
    Row("expert soup", "soup", "family experts"),
)


@dataclass(frozen=True)
class Cell:
    """A cell of the table: a row's loss in a column, as a difference from another one's, in nats per target."""

    row: str
    column: Column
    reference: str
    interval: Interval


def columns_of(families: Sequence[Family], general: str) -> dict[Column, dict[str, tuple[str, ...]]]:
    """Languages of each column, by family."""
    return {
        "trained": {family.name: family.trained for family in families},
        "general": {family.name: (general,) for family in families},
        "unseen": {family.name: family.unseen for family in families},
    }


def row_losses(row: Row, losses: ModelLosses, families: Sequence[Family], general: str) -> dict[Column, float]:
    """A row's loss in each column: the mean over families of the mean over the family's languages.

    Each family's part is the loss of the model that stands for it, so an expert counts on its own family alone.
    """
    return {
        column: fmean(
            fmean(losses[row.model(family)][language] for language in languages[family.name]) for family in families
        )
        for column, languages in columns_of(families, general).items()
    }


def base_losses(base: Mapping[str, float], families: Sequence[Family], general: str) -> dict[Column, float]:
    """The base's loss in each column, averaged as a row's."""
    return row_losses(Row("base", "base"), {"base": dict(base)}, families, general)


def compare(
    row: str, reference: str, losses: Sequence[Mapping[Column, float]], against: Sequence[Mapping[Column, float]]
) -> list[Cell]:
    """Differences between two rows, seed by seed, with their interval over seeds.

    Args:
        row: its title.
        reference: title of the other.
        losses: of the row, for each seed.
        against: of the other, for the same seeds.
    """
    return [
        Cell(row, column, reference, t_interval([a[column] - b[column] for a, b in zip(losses, against, strict=True)]))
        for column in get_args(Column)
    ]


def study_cells(
    families: Sequence[Family], general: str, base: Mapping[str, float], losses: Mapping[int, ModelLosses]
) -> tuple[list[Cell], list[Cell]]:
    """All rows against the base, and the strategies against the baselines that they answer to."""
    at_base = [base_losses(base, families, general)] * len(losses)
    by_row = {row.title: [row_losses(row, of_seed, families, general) for of_seed in losses.values()] for row in ROWS}
    against_base = [cell for row in ROWS for cell in compare(row.title, "base", by_row[row.title], at_base)]
    against_baselines = [
        cell
        for row in ROWS
        if row.baseline
        for cell in compare(row.title, row.baseline, by_row[row.title], by_row[row.baseline])
    ]
    return against_base, against_baselines
