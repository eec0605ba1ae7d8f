"""The task of classifying texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from typing_extensions import override

from lit_encoders.evaluation.embeddings import embed
from lit_encoders.evaluation.finetuning import Example, fine_tune
from lit_encoders.evaluation.items import LabelledText, read_labelled
from lit_encoders.evaluation.linear_probes import fit_classifier
from lit_encoders.evaluation.scores import Scores, class_scores
from lit_encoders.evaluation.task_base import (
    LearnedItems,
    LearningTask,
    Mode,
    check_labels,
    check_mode,
    example_rows,
    spread,
)
from lit_encoders.modules.open_module import open_module


@dataclass(frozen=True)
class Classification(LearningTask):
    """Classify texts: accuracy, macro F1, F1 of each class.

    Attributes:
        train: file with training texts.
        test: file with test texts; their classes have to be among those of training.
        text: column of the text.
        label: column of the class.
        group: column that wins and losses are counted by; "" for none.
        mode: "fine-tune" the encoder, or "probe": logistic regression on its resting embeddings.
        read: gives training and test items in place of files.
    """

    train: str = ""
    test: str = ""
    text: str = "text"
    label: str = "label"
    group: str = ""
    mode: Mode = "fine-tune"
    read: Callable[[], tuple[list[LabelledText], list[LabelledText]]] | None = None

    main_metric: ClassVar[str] = "macro_f1"

    def __post_init__(self) -> None:
        check_mode(self.key, self.mode, ("fine-tune", "probe"))

    @property
    @override
    def files(self) -> tuple[str, ...]:
        return ("train", "test")

    @property
    @override
    def is_seeded(self) -> bool:
        return self.mode == "fine-tune"

    @property
    @override
    def protocol(self) -> dict[str, Any]:
        resting = ("pooling", "sequence_length", "limit")
        learning = {name: value for name, value in self.learning.items() if self.is_seeded or name in resting}
        return {"mode": self.mode, **learning}

    @override
    def load(self) -> LearnedItems:
        if self.read is not None:
            every, tested = self.read()
        else:
            every, tested = (
                read_labelled(files, f"{self.key}.{name}", self.text, self.label, self.group)
                for name, files in (("train", self.train), ("test", self.test))
            )
        classes = sorted({item.label for item in every})
        train, test = spread(every, self.limit), spread(tested, self.test_limit)
        check_labels(self.key, classes, (item.label for item in test))
        left = sorted({item.label for item in train})
        if len(left) < 2:
            limited = f" with limit {self.limit}" if len(classes) > 1 else ""
            raise ValueError(f"{self.key}.train must have at least two classes, got {', '.join(left)}{limited}")
        return LearnedItems(train, test, classes)

    @override
    def num_items(self, items: LearnedItems) -> int:
        return len(items.test)

    @override
    def groups(self, items: LearnedItems) -> list[str]:
        return [item.group for item in items.test]

    @override
    def run(self, model: str, items: LearnedItems, seed: int) -> Scores:
        texts = {"train": [item.text for item in items.train], "test": [item.text for item in items.test]}
        gold = [item.label for item in items.test]
        module = open_module(model, on_gpu=True)
        if self.mode == "probe":
            vectors = {side: embed(module, texts[side], **self.embedding) for side in ("train", "test")}
            probe = fit_classifier(vectors["train"], [item.label for item in items.train])
            said = probe.predict(vectors["test"].numpy()).tolist()
            return class_scores(gold, said, items.classes)
        numbers = {name: place for place, name in enumerate(items.classes)}
        rows = example_rows(module, texts["train"], self.fine_tuning.sequence_length)
        examples = [Example((row,), (numbers[item.label],)) for row, item in zip(rows, items.train, strict=True)]
        tuner = fine_tune(lambda: open_module(model, on_gpu=True), examples, len(items.classes), self.fine_tuning, seed)
        assert tuner.head is not None
        with torch.no_grad():
            best = tuner.head(embed(tuner.encoder, texts["test"], **self.embedding)).argmax(1)
        return class_scores(gold, [items.classes[place] for place in best.tolist()], items.classes)
