"""What all kinds of tasks have, and what those have that a model is fine-tuned for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeVar

from typing_extensions import override

from lit_encoders.data.tokens import affixes
from lit_encoders.evaluation.embeddings import token_rows
from lit_encoders.evaluation.finetuning import FineTuning
from lit_encoders.evaluation.scores import Scores
from lit_encoders.modules.lit_encoder import LitEncoder

Mode = Literal["fine-tune", "probe", "zero-shot"]
Item = TypeVar("Item")


@dataclass(frozen=True)
class Task(ABC):
    """What all kinds have.

    Attributes:
        name: in tables.
    """

    name: str

    # The metric of the main table.
    main_metric: ClassVar[str] = ""

    @property
    def key(self) -> str:
        """Prefix of the task's settings in messages."""
        return f"tasks.{self.name}"

    @property
    @abstractmethod
    def files(self) -> tuple[str, ...]:
        """Settings that have to name a file."""

    @property
    @abstractmethod
    def is_seeded(self) -> bool:
        """Whether a run depends on a seed."""

    @property
    @abstractmethod
    def protocol(self) -> dict[str, Any]:
        """What a figure depends on beside model and items, for the result."""

    @abstractmethod
    def check(self, module: LitEncoder) -> None:
        """Refuse a model that the task cannot be run with, before any run.

        Raises:
            ValueError: a setting does not fit the model.
        """

    @abstractmethod
    def load(self) -> Any:
        """Read the items, once for all models.

        Raises:
            ValueError: a file, a column or a value is not what it has to be.
        """

    @abstractmethod
    def num_items(self, items: Any) -> int:
        """How many items are tested."""

    @abstractmethod
    def groups(self, items: Any) -> list[str]:
        """Group of each tested item; "" for none."""

    @abstractmethod
    def run(self, model: str, items: Any, seed: int) -> Scores:
        """Evaluate one model, once."""


@dataclass(frozen=True)
class LearningTask(Task):
    """What those kinds have that a model may be fine-tuned for.

    Attributes:
        limit: most training items, evenly from all of them; None takes all. Classes are those of all.
        test_limit: most test items, evenly from all of them; None takes all.
        fine_tuning: how; where a model rests, its sequence_length and pooling.
    """

    limit: int | None = None
    test_limit: int | None = None
    fine_tuning: FineTuning = field(default_factory=FineTuning)

    @override
    def check(self, module: LitEncoder) -> None:
        length, key = self.fine_tuning.sequence_length, f"{self.key}.fine_tuning.sequence_length"
        if module.max_positions is not None and length > module.max_positions:
            raise ValueError(
                f"{key} must be at most the {module.max_positions} positions of '{module.source}', got {length}"
            )
        around = affixes(module.tokenizer)
        special = len(around.prefix) + len(around.suffix)
        if length <= special:
            raise ValueError(
                f"{key} must be above the {special} special tokens of '{module.source}' around a text, got {length}"
            )

    @property
    def embedding(self) -> dict[str, Any]:
        """Arguments of `embed`."""
        length = self.fine_tuning.sequence_length
        return {"sequence_length": length, "slots": max(4096, length), "pooling": self.fine_tuning.pooling}

    @property
    def learning(self) -> dict[str, Any]:
        """How a model is fine-tuned, for the result."""
        settings = {item.name: getattr(self.fine_tuning, item.name) for item in fields(self.fine_tuning)}
        return {**settings, **({} if self.limit is None else {"limit": self.limit})}


@dataclass(frozen=True)
class LearnedItems:
    """Items of a task with classes, and the classes in order."""

    train: Sequence[Any]
    test: Sequence[Any]
    classes: list[str]


def spread(items: Sequence[Item], count: int | None) -> list[Item]:
    """So many items, evenly from all: files are often sorted by class.

    >>> spread(range(10), 4), spread(range(3), 4)
    ([0, 2, 5, 7], [0, 1, 2])
    """
    if count is None or len(items) <= count:
        return list(items)
    return [items[place * len(items) // count] for place in range(count)]


def check_mode(key: str, mode: str, allowed: Sequence[str]) -> None:
    """Refuse a mode that the kind does not have."""
    if mode not in allowed:
        raise ValueError(f"{key}.mode must be one of {', '.join(allowed)}, got {mode!r}")


def check_labels(key: str, classes: Sequence[str], tested: Iterable[str]) -> None:
    """Refuse a tested label that is in no training item."""
    unseen = sorted(set(tested) - set(classes))
    if unseen:
        raise ValueError(f"{key}.test must have only labels that are in {key}.train, got {unseen[0]!r}")


def example_rows(module: LitEncoder, texts: Sequence[str], sequence_length: int) -> list[tuple[int, ...]]:
    """Token ids of texts to learn from, with their special tokens."""
    return [tuple(row) for row in token_rows(module, texts, sequence_length, sequence_length)]
