"""Tasks that a model is evaluated on: what each kind needs, and what one run of a model gets on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from lit_encoders.evaluation.embeddings import embed, last_hidden, read_packs, token_rows
from lit_encoders.evaluation.finetuning import Example, FineTuning, fine_tune
from lit_encoders.evaluation.items import (
    Collection,
    LabelledText,
    TaggedWords,
    read_collection,
    read_labelled,
    read_pairs,
    read_tagged,
)
from lit_encoders.evaluation.language_modeling import language_scores
from lit_encoders.evaluation.linear_probes import fit_classifier
from lit_encoders.evaluation.ranking import ranking_scores
from lit_encoders.evaluation.scores import Scores, class_scores
from lit_encoders.evaluation.tagging import OUTSIDE, Scheme, check_scheme, span_scores, tokenise_words
from lit_encoders.evaluation.texts import first_texts
from lit_encoders.modules.lit_encoder import LitEncoder
from lit_encoders.modules.open_module import open_module

Mode = Literal["fine-tune", "probe", "zero-shot"]


@dataclass(frozen=True)
class Task:
    """What all kinds have.

    Attributes:
        name: in tables.
        limit: most training items, evenly from all of them; None takes all. Classes are those of all.
        test_limit: most test items, evenly from all of them; None takes all.
    """

    name: str
    limit: int | None = None
    test_limit: int | None = None

    # Whether one run depends on a seed; the metric of the main table.
    seeded: ClassVar[bool] = True
    main_metric: ClassVar[str] = ""

    @property
    def key(self) -> str:
        """Prefix of the task's settings in messages."""
        return f"tasks.{self.name}"

    def load(self) -> Any:
        """Read the items, once for all models.

        Raises:
            ValueError: a file, a column or a value is not what it has to be.
        """
        raise NotImplementedError

    def num_items(self, items: Any) -> int:
        """How many items are tested."""
        raise NotImplementedError

    def groups(self, items: Any) -> list[str]:
        """Group of each tested item; "" for none."""
        raise NotImplementedError

    def run(self, model: str, items: Any, seed: int) -> Scores:
        """Evaluate one model, once."""
        raise NotImplementedError

    @property
    def protocol(self) -> dict[str, Any]:
        """What a figure depends on beside model and items, for the result."""
        return {}


@dataclass(frozen=True)
class Perplexity(Task):
    """Perplexity and bits per byte of held-out text; see `language_scores`.

    Attributes:
        text: file of documents, as data.train takes it.
        column: of the text, in anything but plain text.
        sequence_length: longest window in tokens.
        stride: of CLM's windows.
        mask_ratio: of MLM.
        documents: how many, from the first.
    """

    text: str = ""
    column: str = "text"
    sequence_length: int = 512
    stride: int | None = None
    mask_ratio: float = 0.15
    documents: int = 500

    seeded: ClassVar[bool] = False
    main_metric: ClassVar[str] = "bits_per_byte"

    def load(self) -> list[str]:
        return first_texts(self.text, self.documents, f"{self.key}.text", self.column)

    def num_items(self, items: list[str]) -> int:
        return len(items)

    def groups(self, items: list[str]) -> list[str]:
        return [""] * len(items)

    def run(self, model: str, items: list[str], seed: int) -> Scores:
        return language_scores(
            open_module(model),
            items,
            sequence_length=self.sequence_length,
            stride=self.stride,
            mask_ratio=self.mask_ratio,
        )

    @property
    def protocol(self) -> dict[str, Any]:
        return {"sequence_length": self.sequence_length, "stride": self.stride, "mask_ratio": self.mask_ratio}


@dataclass(frozen=True)
class _Labelled:
    """Items of a task with classes, and the classes in order."""

    train: Sequence[Any]
    test: Sequence[Any]
    classes: list[str]


@dataclass(frozen=True)
class Classification(Task):
    """Classify texts: accuracy, macro F1, F1 of each class.

    Attributes:
        train: file with training texts.
        test: file with test texts; their classes have to be among those of training.
        text: column of the text.
        label: column of the class.
        group: column that wins and losses are counted by; "" for none.
        mode: "fine-tune" the encoder, or "probe": logistic regression on its resting embeddings.
        fine_tuning: how.
        read: gives training and test items in place of files.
    """

    train: str = ""
    test: str = ""
    text: str = "text"
    label: str = "label"
    group: str = ""
    mode: Mode = "fine-tune"
    fine_tuning: FineTuning = field(default_factory=FineTuning)
    read: Callable[[], tuple[list[LabelledText], list[LabelledText]]] | None = None

    main_metric: ClassVar[str] = "macro_f1"

    def __post_init__(self) -> None:
        _check_mode(self.key, self.mode, ("fine-tune", "probe"))

    def load(self) -> _Labelled:
        if self.read is not None:
            train, test = self.read()
        else:
            train, test = (
                read_labelled(files, f"{self.key}.{name}", self.text, self.label, self.group)
                for name, files in (("train", self.train), ("test", self.test))
            )
        classes = sorted({item.label for item in train})
        train, test = spread(train, self.limit), spread(test, self.test_limit)
        _check_labels(self.key, classes, (item.label for item in test))
        if len(classes) < 2:
            raise ValueError(f"{self.key}.train must have at least two classes, got {classes}")
        return _Labelled(train, test, classes)

    def num_items(self, items: _Labelled) -> int:
        return len(items.test)

    def groups(self, items: _Labelled) -> list[str]:
        return [item.group for item in items.test]

    def run(self, model: str, items: _Labelled, seed: int) -> Scores:
        settings = self.fine_tuning
        texts = {"train": [item.text for item in items.train], "test": [item.text for item in items.test]}
        gold = [item.label for item in items.test]
        read: dict[str, Any] = {"sequence_length": settings.sequence_length, "pooling": settings.pooling}
        if self.mode == "probe":
            module = open_module(model)
            probe = fit_classifier(embed(module, texts["train"], **read), [item.label for item in items.train])
            return class_scores(gold, probe.predict(embed(module, texts["test"], **read).numpy()), items.classes)
        numbers = {name: place for place, name in enumerate(items.classes)}
        rows = _rows(model, texts["train"], settings.sequence_length)
        examples = [Example((row,), (numbers[item.label],)) for row, item in zip(rows, items.train, strict=True)]
        tuner = fine_tune(lambda: open_module(model), examples, len(items.classes), settings, seed)
        assert tuner.head is not None
        with torch.no_grad():
            said = tuner.head(embed(tuner.encoder, texts["test"], **read)).argmax(1)
        return class_scores(gold, [items.classes[place] for place in said.tolist()], items.classes)

    @property
    def protocol(self) -> dict[str, Any]:
        return {"mode": self.mode, **({} if self.mode == "probe" else _plain(self.fine_tuning))}


@dataclass(frozen=True)
class Tagging(Task):
    """Tag words: strict F1 over spans; see `span_scores`.

    Attributes:
        train: file with training sentences.
        test: file with test sentences.
        tokens: column of the words, a list.
        tags: column of their tags, a list.
        group: column that wins and losses are counted by; "" for none.
        scheme: how tags make spans; "words" where they make none.
        fine_tuning: how.
        read: gives training and test items in place of files.
    """

    train: str = ""
    test: str = ""
    tokens: str = "tokens"
    tags: str = "tags"
    group: str = ""
    scheme: Scheme = "IOB2"
    fine_tuning: FineTuning = field(default_factory=FineTuning)
    read: Callable[[], tuple[list[TaggedWords], list[TaggedWords]]] | None = None

    main_metric: ClassVar[str] = "span_f1"

    def load(self) -> _Labelled:
        if self.read is not None:
            train, test = self.read()
        else:
            train, test = (
                read_tagged(files, f"{self.key}.{name}", self.tokens, self.tags, self.group)
                for name, files in (("train", self.train), ("test", self.test))
            )
        check_scheme(self.scheme, [*train, *test], f"{self.key}.scheme")
        known = {tag for item in train for tag in item.tags}
        classes = sorted({*known, *([OUTSIDE] if self.scheme != "words" else [])})
        train, test = spread(train, self.limit), spread(test, self.test_limit)
        _check_labels(self.key, classes, (tag for item in test for tag in item.tags))
        return _Labelled(train, test, classes)

    def num_items(self, items: _Labelled) -> int:
        return len(items.test)

    def groups(self, items: _Labelled) -> list[str]:
        return [item.group for item in items.test]

    def run(self, model: str, items: _Labelled, seed: int) -> Scores:
        settings = self.fine_tuning
        numbers = {name: place for place, name in enumerate(items.classes)}
        module = open_module(model)
        examples = []
        for item in items.train:
            row, places = tokenise_words(module.tokenizer, item.words, settings.sequence_length)
            there = [(place, numbers[tag]) for place, tag in zip(places, item.tags, strict=True) if place >= 0]
            if there:
                kept, labels = zip(*there, strict=True)
                examples.append(Example((tuple(row),), labels, kept))
        tuner = fine_tune(lambda: open_module(model), examples, len(items.classes), settings, seed)
        predicted = predict_tags(
            tuner.encoder, tuner.head, items.test, items.classes, settings.sequence_length, self._miss
        )
        gold = [list(item.tags) for item in items.test]
        return span_scores(gold, predicted, self.scheme)

    @property
    def _miss(self) -> str:
        """What a word is tagged that was cut off: outside of all spans, or nothing that could be right."""
        return OUTSIDE if self.scheme != "words" else ""

    @property
    def protocol(self) -> dict[str, Any]:
        return {"scheme": self.scheme, **_plain(self.fine_tuning)}


@torch.no_grad()
def predict_tags(
    encoder: LitEncoder,
    head: torch.nn.Linear | None,
    items: Sequence[TaggedWords],
    classes: Sequence[str],
    sequence_length: int,
    miss: str,
) -> list[list[str]]:
    """Tags of all words, in the order of the items; ``miss`` for a word that was cut off or has no piece."""
    assert head is not None
    tokenised = [tokenise_words(encoder.tokenizer, item.words, sequence_length) for item in items]
    rows = [row for row, _ in tokenised]
    found = [[miss] * len(item.words) for item in items]
    for pack, sizes, hidden in read_packs(encoder, rows, max(4096, sequence_length), None, last_hidden):
        said = head(hidden[0]).argmax(1).tolist()
        starts = (sizes.cumsum(0) - sizes).tolist()
        for number, start in zip(pack, starts, strict=True):
            for word, place in enumerate(tokenised[number][1]):
                if place >= 0:
                    found[number][word] = classes[said[start + place]]
    return found


@dataclass(frozen=True)
class _Searched:
    """Items of a retrieval task."""

    train: Collection | None
    test: Collection


@dataclass(frozen=True)
class Retrieval(Task):
    """Find documents by a query's vector: nDCG@10, MRR@10, recall@10.

    Attributes:
        train: file with pairs of a query and its document, to learn from.
        test: file with such pairs, or a folder in BEIR's form.
        query: column of the query.
        document: column of the document.
        group: column that wins and losses are counted by; "" for none.
        mode: "zero-shot", or "fine-tune" as a bi-encoder with the other documents of a batch as negatives.
        drop_self_matches: leave out a document that has the query's id.
        fine_tuning: how; of a zero-shot model its pooling and sequence_length.
        read: gives training and test collections in place of files.
    """

    train: str = ""
    test: str = ""
    query: str = "query"
    document: str = "document"
    group: str = ""
    mode: Mode = "zero-shot"
    drop_self_matches: bool = False
    fine_tuning: FineTuning = field(default_factory=FineTuning)
    read: Callable[[], tuple[Collection | None, Collection]] | None = None

    main_metric: ClassVar[str] = "ndcg@10"

    def __post_init__(self) -> None:
        _check_mode(self.key, self.mode, ("fine-tune", "zero-shot"))

    def load(self) -> _Searched:
        if self.read is not None:
            train, test = self.read()
        else:
            train = self._collection("train", self.train) if self.mode == "fine-tune" else None
            test = self._collection("test", self.test)
        if train is not None and self.limit is not None:
            train = Collection(train.documents, spread(train.queries, self.limit))
        if self.test_limit is not None:
            test = Collection(test.documents, spread(test.queries, self.test_limit))
        return _Searched(train, test)

    def _collection(self, name: str, files: str) -> Collection:
        if Path(files).is_dir() and (Path(files) / "corpus.jsonl").is_file():
            return read_collection(files, f"{self.key}.{name}")
        return read_pairs(files, f"{self.key}.{name}", self.query, self.document, self.group)

    def num_items(self, items: _Searched) -> int:
        return len(items.test.queries)

    def groups(self, items: _Searched) -> list[str]:
        return [query.group for query in items.test.queries]

    def run(self, model: str, items: _Searched, seed: int) -> Scores:
        settings = self.fine_tuning
        module = open_module(model)
        if self.mode == "fine-tune":
            assert items.train is not None
            pairs = [
                (query.text, items.train.documents[name]) for query in items.train.queries for name in query.relevant
            ]
            sides = [_rows(model, [pair[side] for pair in pairs], settings.sequence_length) for side in (0, 1)]
            examples = [Example(both) for both in zip(*sides, strict=True)]
            module = fine_tune(lambda: open_module(model), examples, 0, settings, seed).encoder
        read: dict[str, Any] = {"sequence_length": settings.sequence_length, "pooling": settings.pooling}
        queries = embed(module, [query.text for query in items.test.queries], **read)
        documents = embed(module, list(items.test.documents.values()), **read)
        return ranking_scores(queries, documents, items.test, drop_self_matches=self.drop_self_matches)

    @property
    def protocol(self) -> dict[str, Any]:
        tuned = _plain(self.fine_tuning)
        kept = tuned if self.mode == "fine-tune" else {name: tuned[name] for name in ("pooling", "sequence_length")}
        return {"mode": self.mode, "drop_self_matches": self.drop_self_matches, **kept}


KINDS: dict[str, type[Task]] = {
    "perplexity": Perplexity,
    "classification": Classification,
    "tagging": Tagging,
    "retrieval": Retrieval,
}


def spread(items: Sequence[Any], count: int | None) -> Sequence[Any]:
    """So many items, evenly from all: files are often sorted by class.

    >>> spread(range(10), 4), spread(range(3), 4)
    ([0, 2, 5, 7], range(0, 3))
    """
    if count is None or len(items) <= count:
        return items
    return [items[place * len(items) // count] for place in range(count)]


def is_seeded(task: Task) -> bool:
    """Whether a run of the task depends on a seed."""
    return task.seeded and getattr(task, "mode", "fine-tune") == "fine-tune"


def make_task(name: str, settings: Any) -> Task:
    """Make a task out of its settings in a file.

    Args:
        name: of the task.
        settings: mapping with its ``kind`` and the attributes of that kind.

    Raises:
        ValueError: a setting is unknown, missing, or of another type.
    """
    if not isinstance(settings, dict) or settings.get("kind") not in KINDS:
        got = settings.get("kind") if isinstance(settings, dict) else settings
        raise ValueError(f"tasks.{name}.kind must be one of {', '.join(KINDS)}, got {got!r}")
    kind = KINDS[settings["kind"]]
    allowed = [item.name for item in fields(kind) if item.name not in ("name", "read")]
    given = {key: value for key, value in settings.items() if key != "kind"}
    for key in given:
        if key not in allowed:
            near = get_close_matches(key, allowed, n=1)
            raise ValueError(
                f"tasks.{name}.{key} is no setting of {settings['kind']}" + (f"; {near[0]}?" if near else "")
            )
    if "fine_tuning" in given:
        given["fine_tuning"] = _fine_tuning(name, given["fine_tuning"])
    files = ("text",) if kind is Perplexity else ("train", "test")
    if kind is Retrieval and given.get("mode", "zero-shot") == "zero-shot":
        files = ("test",)
    for key in files:
        if not isinstance(given.get(key), str) or not given[key]:
            raise ValueError(f"tasks.{name}.{key} must name a file or dataset, got {given.get(key)!r}")
    _check_types(name, kind, given)
    return kind(name=name, **given)


def override(task: Task, name: str, settings: dict[str, Any]) -> Task:
    """A task under another name, with some settings changed, as a file changes those of a preset.

    Raises:
        ValueError: a setting is unknown or of another type.
    """
    given = dict(settings)
    files = ("name", "read", "train", "test", "text", "label", "tokens", "tags", "query", "document", "group")
    allowed = [item.name for item in fields(task) if item.name not in files]
    for key in given:
        if key not in allowed:
            raise ValueError(f"tasks.{name}.{key} must be one of {', '.join(allowed)} beside a preset, got {key!r}")
    _check_types(name, type(task), given)
    if "fine_tuning" in given:
        given["fine_tuning"] = _fine_tuning(name, given["fine_tuning"], getattr(task, "fine_tuning", FineTuning()))
    return replace(task, name=name, **given)


def _fine_tuning(name: str, given: Any, start: FineTuning | None = None) -> FineTuning:
    allowed = [item.name for item in fields(FineTuning)]
    if not isinstance(given, dict) or not set(given) <= set(allowed):
        raise ValueError(f"tasks.{name}.fine_tuning must have settings of {', '.join(allowed)}, got {given!r}")
    try:
        _check_types(f"{name}.fine_tuning", FineTuning, given)
        return replace(start or FineTuning(), **given)
    except ValueError as error:
        raise ValueError(str(error).replace("fine_tuning.", f"tasks.{name}.fine_tuning.", 1)) from None


def _check_types(name: str, kind: Any, given: dict[str, Any]) -> None:
    """Refuse a number where there has to be text, and the other way round; annotations are text here."""
    for item in fields(kind):
        if item.name not in given or item.name in ("fine_tuning", "read"):
            continue
        value, kind_name = given[item.name], str(item.type)
        types: tuple[type, ...] = (str,)
        if kind_name.startswith("int"):
            types = (int,)
        elif kind_name.startswith("float"):
            types = (int, float)
        elif kind_name.startswith("bool"):
            types = (bool,)
        wrong = not isinstance(value, types) or (isinstance(value, bool) and bool not in types)
        if wrong and not (value is None and "None" in kind_name):
            raise ValueError(f"tasks.{name}.{item.name} must be {types[-1].__name__}, got {value!r}")
    for key in ("limit", "test_limit", "documents"):
        if given.get(key) is not None and given[key] < 1:
            raise ValueError(f"tasks.{name}.{key} must be at least 1, got {given[key]}")


def _check_mode(key: str, mode: str, allowed: Sequence[str]) -> None:
    if mode not in allowed:
        raise ValueError(f"{key}.mode must be one of {', '.join(allowed)}, got {mode!r}")


def _check_labels(key: str, classes: Sequence[str], tested: Any) -> None:
    unseen = sorted(set(tested) - set(classes))
    if unseen:
        raise ValueError(f"{key}.test must have only labels that are in {key}.train, got {unseen[0]!r}")


def _rows(model: str, texts: Sequence[str], sequence_length: int) -> list[tuple[int, ...]]:
    module = open_module(model)
    return [tuple(row) for row in token_rows(module, texts, sequence_length, sequence_length)]


def _plain(settings: FineTuning) -> dict[str, Any]:
    return {item.name: getattr(settings, item.name) for item in fields(settings)}
