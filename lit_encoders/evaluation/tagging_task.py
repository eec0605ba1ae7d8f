"""The task of tagging words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from typing_extensions import override

from lit_encoders.evaluation.embeddings import last_hidden, read_packs
from lit_encoders.evaluation.finetuning import Example, fine_tune
from lit_encoders.evaluation.items import TaggedWords, read_tagged
from lit_encoders.evaluation.scores import Scores
from lit_encoders.evaluation.tagging import (
    MISSED,
    OUTSIDE,
    Scheme,
    check_fast,
    check_scheme,
    span_scores,
    tokenise_words,
)
from lit_encoders.evaluation.task_base import LearnedItems, LearningTask, check_labels, spread
from lit_encoders.modules.lit_encoder import LitEncoder
from lit_encoders.modules.open_module import open_module


@dataclass(frozen=True)
class Tagging(LearningTask):
    """Tag words: strict F1 over spans; see `span_scores`.

    Attributes:
        train: file with training sentences.
        test: file with test sentences.
        tokens: column of the words, a list.
        tags: column of their tags, a list.
        group: column that wins and losses are counted by; "" for none.
        scheme: how tags make spans; "words" where they make none.
        read: gives training and test items in place of files.
    """

    train: str = ""
    test: str = ""
    tokens: str = "tokens"
    tags: str = "tags"
    group: str = ""
    scheme: Scheme = "IOB2"
    read: Callable[[], tuple[list[TaggedWords], list[TaggedWords]]] | None = None

    main_metric: ClassVar[str] = "span_f1"

    def __post_init__(self) -> None:
        check_scheme(self.scheme, key=f"{self.key}.scheme")

    @property
    @override
    def files(self) -> tuple[str, ...]:
        return ("train", "test")

    @property
    @override
    def is_seeded(self) -> bool:
        return True

    @property
    @override
    def protocol(self) -> dict[str, Any]:
        learning = {name: value for name, value in self.learning.items() if name not in ("pooling", "temperature")}
        return {"scheme": self.scheme, **learning}

    @override
    def check(self, module: LitEncoder) -> None:
        super().check(module)
        check_fast(module.tokenizer)

    @override
    def load(self) -> LearnedItems:
        if self.read is not None:
            every, tested = self.read()
        else:
            every, tested = (
                read_tagged(files, f"{self.key}.{name}", self.tokens, self.tags, self.group)
                for name, files in (("train", self.train), ("test", self.test))
            )
        check_scheme(self.scheme, [*every, *tested], f"{self.key}.scheme")
        known = {tag for item in every for tag in item.tags}
        classes = sorted({*known, *([OUTSIDE] if self.scheme != "words" else [])})
        train, test = spread(every, self.limit), spread(tested, self.test_limit)
        check_labels(self.key, classes, (tag for item in test for tag in item.tags))
        return LearnedItems(train, test, classes)

    @override
    def num_items(self, items: LearnedItems) -> int:
        return len(items.test)

    @override
    def groups(self, items: LearnedItems) -> list[str]:
        return [item.group for item in items.test]

    @override
    def run(self, model: str, items: LearnedItems, seed: int) -> Scores:
        settings = self.fine_tuning
        numbers = {name: place for place, name in enumerate(items.classes)}
        module = open_module(model, on_gpu=True)
        examples = []
        for item in items.train:
            row, places = tokenise_words(module.tokenizer, item.words, settings.sequence_length)
            there = [(place, numbers[tag]) for place, tag in zip(places, item.tags, strict=True) if place >= 0]
            if there:
                kept, labels = zip(*there, strict=True)
                examples.append(Example((tuple(row),), labels, kept))
        if not examples:
            raise ValueError(
                f"{self.key}.train must have words that the tokenizer of {model!r} has pieces for, got none"
            )
        tuner = fine_tune(lambda: open_module(model, on_gpu=True), examples, len(items.classes), settings, seed)
        assert tuner.head is not None
        # A word that was cut off is outside of all spans, or nothing that could be right.
        miss = OUTSIDE if self.scheme != "words" else MISSED
        predicted = predict_tags(tuner.encoder, tuner.head, items.test, items.classes, settings.sequence_length, miss)
        return span_scores([item.tags for item in items.test], predicted, self.scheme, items.classes)


@torch.no_grad()
def predict_tags(
    encoder: LitEncoder,
    head: torch.nn.Linear,
    items: Sequence[TaggedWords],
    classes: Sequence[str],
    sequence_length: int,
    miss: str,
) -> list[list[str]]:
    """Tags of all words, in the order of the items.

    Args:
        encoder: fine-tuned.
        head: over last hidden states, a row for each class.
        items: whose words to tag; their own tags are not looked at.
        classes: tags, in the order of the head's rows.
        sequence_length: longest sentence in tokens.
        miss: tag of a word that was cut off or has no piece.
    """
    tokenised = [tokenise_words(encoder.tokenizer, item.words, sequence_length) for item in items]
    rows = [row for row, _ in tokenised]
    found = [[miss] * len(item.words) for item in items]
    for pack, sizes, hidden in read_packs(encoder, rows, max(4096, sequence_length), None, last_hidden):
        said = head(hidden[0].cpu()).argmax(1).tolist()
        starts = (sizes.cumsum(0) - sizes).tolist()
        for number, start in zip(pack, starts, strict=True):
            for word, place in enumerate(tokenised[number][1]):
                if place >= 0:
                    found[number][word] = classes[said[start + place]]
    return found
