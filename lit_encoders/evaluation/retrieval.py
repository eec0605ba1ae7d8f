"""The task of finding the documents that answer a query."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from lit_encoders.evaluation.embeddings import embed
from lit_encoders.evaluation.finetuning import Example, fine_tune
from lit_encoders.evaluation.items import Collection, read_collection, read_pairs
from lit_encoders.evaluation.ranking import ranking_scores
from lit_encoders.evaluation.scores import Scores
from lit_encoders.evaluation.task_base import LearningTask, Mode, check_mode, example_rows, spread
from lit_encoders.modules.open_module import open_module


@dataclass(frozen=True)
class SearchedItems:
    """Items of a retrieval task."""

    train: Collection | None
    test: Collection


@dataclass(frozen=True)
class Retrieval(LearningTask):
    """Find documents by a query's vector: nDCG@10, MRR@10, recall@10.

    Attributes:
        train: file with pairs of a query and its document, to learn from.
        test: file with such pairs, or a folder in BEIR's form.
        query: column of the query.
        document: column of the document.
        group: column that wins and losses are counted by; "" for none.
        mode: "zero-shot", or "fine-tune" as a bi-encoder with the other documents of a batch as negatives.
        drop_self_matches: leave out a document that has the query's id.
        read: gives training and test collections in place of files.
    """

    train: str = ""
    test: str = ""
    query: str = "query"
    document: str = "document"
    group: str = ""
    mode: Mode = "zero-shot"
    drop_self_matches: bool = False
    read: Callable[[], tuple[Collection | None, Collection]] | None = None

    main_metric: ClassVar[str] = "ndcg@10"

    def __post_init__(self) -> None:
        check_mode(self.key, self.mode, ("fine-tune", "zero-shot"))
        if self.is_seeded and self.fine_tuning.batch < 2:
            raise ValueError(
                f"{self.key}.fine_tuning.batch must be at least 2 (the other documents of a batch are the negatives), "
                f"got {self.fine_tuning.batch}"
            )

    @property
    @override
    def files(self) -> tuple[str, ...]:
        return ("train", "test") if self.is_seeded else ("test",)

    @property
    @override
    def is_seeded(self) -> bool:
        return self.mode == "fine-tune"

    @property
    @override
    def protocol(self) -> dict[str, Any]:
        resting = ("pooling", "sequence_length")
        learning = {name: value for name, value in self.learning.items() if self.is_seeded or name in resting}
        return {"mode": self.mode, "drop_self_matches": self.drop_self_matches, **learning}

    @override
    def load(self) -> SearchedItems:
        if self.read is not None:
            train, test = self.read()
        else:
            train = self._collection("train", self.train) if self.is_seeded else None
            test = self._collection("test", self.test)
        if train is not None:
            train = Collection(train.documents, spread(train.queries, self.limit))
        return SearchedItems(train, Collection(test.documents, spread(test.queries, self.test_limit)))

    def _collection(self, name: str, files: str) -> Collection:
        if (Path(files) / "corpus.jsonl").is_file():
            return read_collection(files, f"{self.key}.{name}")
        return read_pairs(files, f"{self.key}.{name}", self.query, self.document, self.group)

    @override
    def num_items(self, items: SearchedItems) -> int:
        return len(items.test.queries)

    @override
    def groups(self, items: SearchedItems) -> list[str]:
        return [query.group for query in items.test.queries]

    @override
    def run(self, model: str, items: SearchedItems, seed: int) -> Scores:
        module = open_module(model, on_gpu=True)
        if self.is_seeded:
            assert items.train is not None
            pairs = [
                (query.text, items.train.documents[name]) for query in items.train.queries for name in query.relevant
            ]
            length = self.fine_tuning.sequence_length
            sides = [example_rows(module, [pair[side] for pair in pairs], length) for side in (0, 1)]
            examples = [Example(both) for both in zip(*sides, strict=True)]
            module = fine_tune(lambda: open_module(model, on_gpu=True), examples, 0, self.fine_tuning, seed).encoder
        queries = embed(module, [query.text for query in items.test.queries], **self.embedding)
        documents = embed(module, list(items.test.documents.values()), **self.embedding)
        return ranking_scores(queries, documents, items.test, drop_self_matches=self.drop_self_matches)
