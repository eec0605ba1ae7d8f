"""Mixtures: shares in tokens, every document once per epoch of its source, and any place gone on from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_encoders import LitMLM, TextDataModule
from lit_encoders.data.mixture import SOURCE_BITS, JoinedStores, MixedPlan
from lit_encoders.data.packs import Pack, PackPlan, gather
from lit_encoders.data.tokens import Affixes, TokenStore, write_stores

AROUND = Affixes((2,), (3,))
SIZES = {"large": 300, "small": 40, "tiny": 7}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> dict[str, TokenStore]:
    folder = tmp_path_factory.mktemp("stores")
    draw = np.random.default_rng(0)
    for name, size in SIZES.items():
        texts = [" ".join(f"w{draw.integers(90)}" for _ in range(draw.integers(1, 40))) for _ in range(size)]
        write_stores(texts, tokenizer, lambda _: "train", ("train",), folder / name)
    return {name: TokenStore(folder / name / "train") for name in SIZES}


def mix(stores: dict[str, TokenStore], weights: list[float]) -> MixedPlan:
    plans = {name: PackPlan(store, AROUND, 64, 48, seed=0) for name, store in stores.items()}
    return MixedPlan(plans, weights)


@pytest.mark.parametrize("weights", [[0.7, 0.2, 0.1], [1.0, 1.0, 1.0], [0.001, 0.999, 3.0]])
def test_shares_of_the_tokens_are_met_at_any_time(stores: dict[str, TokenStore], weights: list[float]) -> None:
    given = np.zeros(3)
    for pack in islice(mix(stores, weights).sequence(), 400):
        given[pack.source] += pack.num_tokens
        expected = given.sum() * np.array(weights) / sum(weights)
        assert np.abs(given - expected).max() <= 64 * 2


def test_each_source_gives_every_document_once_before_any_twice(stores: dict[str, TokenStore]) -> None:
    pieces: dict[int, Counter[tuple[int, int]]] = {}
    for pack in islice(mix(stores, [0.6, 0.3, 0.1]).sequence(), 400):
        seen = pieces.setdefault(pack.source, Counter())
        documents = pack.documents - (pack.source << SOURCE_BITS)
        seen.update(
            (pack.here.epoch, document) for document, start in zip(documents, pack.starts, strict=True) if not start
        )
    for source, size in enumerate(SIZES.values()):
        epochs = Counter(epoch for epoch, _ in pieces[source])
        assert max(pieces[source].values()) == 1
        assert all(epochs[epoch] == size for epoch in range(max(epochs)))
    assert max(epoch for epoch, _ in pieces[2]) > max(epoch for epoch, _ in pieces[0])


def same(first: Pack, second: Pack) -> bool:
    return (
        (first.here, first.source, first.after, first.group) == (second.here, second.source, second.after, second.group)
        and first.documents.tolist() == second.documents.tolist()
        and first.starts.tolist() == second.starts.tolist()
    )


def test_any_place_is_gone_on_from_by_any_number_of_ranks(stores: dict[str, TokenStore]) -> None:
    plan = mix(stores, [0.6, 0.3, 0.1])
    alone = list(islice(plan.for_rank(plan.beginning, 0, 1), 240))
    for stopped in (1, 50, 119):
        ranks = [list(islice(plan.for_rank(alone[stopped - 1].after, rank, 2), 60)) for rank in (0, 1)]
        both = [pack for pair in zip(*ranks, strict=True) for pack in pair]
        assert [pack.here for pack in both] == [pack.here for pack in alone[stopped : stopped + 120]]
        again = list(islice(mix(stores, [0.6, 0.3, 0.1]).for_rank(alone[stopped - 1].after, 0, 1), 100))
        assert all(same(a, b) for a, b in zip(again, alone[stopped : stopped + 100], strict=True))


def test_joined_stores_read_what_each_reads(stores: dict[str, TokenStore]) -> None:
    joined = JoinedStores(tuple(stores.values()))
    assert len(joined) == joined.meta.num_documents == sum(SIZES.values())
    for source, store in enumerate(stores.values()):
        shifted = np.arange(len(store)) + (source << SOURCE_BITS)
        assert joined.lengths(shifted).tolist() == store.lengths(np.arange(len(store))).tolist()
        assert joined.tokens(int(shifted[3]), 0, 5).tolist() == store.tokens(3, 0, 5).tolist()
        assert joined.num_eligible(int(shifted[3])) == store.num_eligible(3)
    pack = next(pack for pack in mix(stores, [1, 1, 1]).sequence() if pack.source == 1)
    batch = gather(joined, pack, AROUND, 64, 48, 0)
    pieces = zip(pack.documents.tolist(), pack.starts.tolist(), pack.stops.tolist(), strict=True)
    alone = [stores["small"].tokens(number - (1 << SOURCE_BITS), start, stop) for number, start, stop in pieces]
    ids = [token for token in batch.input_ids[: batch.num_tokens].tolist() if token not in (2, 3)]
    assert ids == np.concatenate(alone).tolist()


@pytest.fixture
def sources(tmp_path: Path, text_file: Path) -> dict[str, Any]:
    lines = text_file.read_text().splitlines()
    for name, part in {"a": lines[:150], "b": lines[150:]}.items():
        (tmp_path / f"{name}.txt").write_text("\n".join(part))
    return {name: str(tmp_path / f"{name}.txt") for name in "ab"}


def test_losses_and_tokens_of_each_source(
    bert_folder: Path, sources: dict[str, Any], make_trainer: Callable[..., Any]
) -> None:
    data = TextDataModule(sources, weights={"a": 0.25, "b": 0.75}, val_share=0.2, sequence_length=48, slots=96)
    module = LitMLM(str(bert_folder))
    trainer = make_trainer(max_steps=6, accumulate_grad_batches=4, num_sanity_val_steps=0)
    trainer.fit(module, data)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert {"train/a/mlm_loss", "train/b/mlm_loss"} <= set(metrics)
    assert data.val_names == ["a", "b"]
    records = module.records()["sources"]
    assert sum(records.values()) == module.tokens
    assert records["a"] / module.tokens == pytest.approx(0.25, abs=96 / module.tokens)
    assert set(data.epochs) == {"a", "b"}  # type: ignore[arg-type]
    state = data.state_dict()
    assert state["weights"] == {"a": 0.25, "b": 0.75}
    place = data.position
    data.position = data.train_plan.beginning
    data.load_state_dict(state)
    assert data.position == place
    with pytest.raises(ValueError, match=r"goes on with the data that it was made with: data.weights"):
        data.load_state_dict({**state, "weights": {"a": 1.0, "b": 1.0}})


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"weights": {"a": 1.0}},
            r"data.weights must have a number for each source of data.train \(a, b\), got \['a'\]",
        ),
        ({"weights": {"a": 1.0, "b": 0.0}}, r"data.weights must be above 0, got 0.0 for b"),
        ({"train": "x.txt", "weights": {"a": 1.0}}, r"\(which needs names\), got \['a'\]"),
        ({"train": {"a b": "x.txt"}}, r"data.train must name its sources in letters, .*, got \['a b'\]"),
        ({"train": {}}, r"data.train must name its sources in letters, .*, got \[\]"),
    ],
)
def test_mistakes(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        TextDataModule(**{"train": {"a": "x.txt", "b": "y.txt"}, **settings})


def test_epochs_cannot_end_a_mixture(
    bert_folder: Path, sources: dict[str, Any], make_trainer: Callable[..., Any]
) -> None:
    with pytest.raises(ValueError, match=r"trainer.max_epochs must be -1 where data.train has several sources"):
        make_trainer(max_epochs=2).fit(
            LitMLM(str(bert_folder)), TextDataModule(sources, val_share=0.2, sequence_length=48)
        )
