"""Streams in a run: who gets which targets, and gradients equal to autograd on the definition of each aggregation."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch.nn.functional import cross_entropy

from lit_encoders import LitEncoder, LitMLM, MaskStream, TextDataModule
from lit_encoders.callbacks import CLMDetour, RunSummary
from lit_encoders.data.packs import PackedBatch, Position, gather

MakeTrainer = Callable[..., Trainer]
NARROW, WIDE = MaskStream("narrow", 0.05, 0.8), MaskStream("wide", 0.5, 0.2)
PAIR = [MaskStream("narrow", 0.1, 0.7), MaskStream("wide", 0.5, 0.3, weight=0.25, head="wide")]


@pytest.fixture(scope="session")
def hundreds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty documents of 100 tokens."""
    path = tmp_path_factory.mktemp("text") / "hundreds.txt"
    path.write_text("\n".join(" ".join(f"w{(i * 7 + j) % 90}" for j in range(100)) for i in range(60)) + "\n")
    return path


def pieces(module: LitEncoder, batches: list[PackedBatch]) -> list[tuple[int, int, int]]:
    """Of each piece in the order of the plan its document, its stream, and how many targets there really are."""
    found = []
    for batch in batches:
        members = module.dealer.members(batch)
        targets = module.targets(batch, "mlm", mask_ratio=module.dealer.ratios(members), seed=0, epoch=batch.here.epoch)
        real = np.bincount(batch.segment_ids[targets.rows].numpy(), minlength=len(members))
        assert real.tolist() == targets.counts.tolist()
        found += list(zip(batch.documents.tolist(), members.tolist(), real.tolist(), strict=True))
    return found


def make_data(text: Path, model: Path, **settings: Any) -> TextDataModule:
    data = TextDataModule(str(text), val=str(text), tokenizer=str(model), **settings)
    data.prepare_data()
    data.setup("fit")
    return data


@pytest.mark.parametrize("slots", [110, 330, 1100])
@pytest.mark.parametrize("workers", [0, 2])
def test_any_five_documents_in_a_row_have_20_and_50_targets(
    bert_folder: Path, hundreds: Path, slots: int, workers: int
) -> None:
    """4:1 at 5 % and 50 %, whatever the packs and the workers."""
    module = LitEncoder(str(bert_folder), streams=[NARROW, WIDE])
    data = make_data(hundreds, bert_folder, sequence_length=104, slots=slots, num_workers=workers)
    batches = list(itertools.islice(data.train_dataloader(), data.packs_per_epoch))
    found = pieces(module, batches)
    assert len(found) == 60
    for first in range(56):
        counts = [sum(n for _, stream, n in found[first : first + 5] if stream == which) for which in (0, 1)]
        assert counts == [20, 50]


def test_ranks_deal_documents_to_the_streams_that_one_process_does(bert_folder: Path, hundreds: Path) -> None:
    module = LitEncoder(str(bert_folder), streams=[NARROW, WIDE])
    data = make_data(hundreds, bert_folder, sequence_length=104, slots=330)
    plan = data.plans["train"]

    def batches(rank: int, world: int) -> list[PackedBatch]:
        packs = itertools.islice(plan.for_rank(Position(), rank, world), 12 // world)
        return [gather(plan.store, pack, plan.affixes, 330, 104, 0) for pack in packs]

    one = [pieces(module, [batch]) for batch in batches(0, 1)]
    assert [pieces(module, [batch]) for batch in batches(0, 2)] == one[::2]
    assert [pieces(module, [batch]) for batch in batches(1, 2)] == one[1::2]


def test_m09_documents_change_streams_between_epochs_and_repeat_within(bert_folder: Path, hundreds: Path) -> None:
    module = LitEncoder(str(bert_folder), streams=[NARROW, WIDE])

    def streams(epoch: int) -> dict[int, int]:
        data = make_data(hundreds, bert_folder, sequence_length=104, slots=330)
        data.position = Position(epoch)
        batches = itertools.takewhile(lambda batch: batch.here.epoch == epoch, data.train_dataloader())
        return {document: stream for document, stream, _ in pieces(module, list(batches))}

    first, second = streams(0), streams(1)
    assert streams(0) == first
    assert first.keys() == second.keys() == set(range(60))
    # Independent draws of 12 of 60 have 2.4 in common; these are fixed by the seed.
    both = sum(first[document] == second[document] == 1 for document in first)
    assert both < 8


@pytest.mark.parametrize("shares_of", ["documents", "tokens"])
def test_three_streams_have_their_shares(bert_folder: Path, text_file: Path, shares_of: Any) -> None:
    streams = [
        MaskStream(f"s{i}", ratio, share) for i, (ratio, share) in enumerate([(0.1, 0.5), (0.3, 0.3), (0.6, 0.2)])
    ]
    module = LitEncoder(str(bert_folder), streams=streams, shares_of=shares_of)
    data = make_data(text_file, bert_folder, sequence_length=48, slots=96)
    totals = np.zeros(3)
    for batch in itertools.islice(data.train_dataloader(), 8 * data.packs_per_epoch):
        weights = batch.lengths if shares_of == "tokens" else None
        totals += np.bincount(module.dealer.members(batch), weights=weights, minlength=3)
    assert totals / totals.sum() == pytest.approx([0.5, 0.3, 0.2], abs=0.02 if shares_of == "tokens" else 0.002)


@pytest.mark.parametrize("micro_batches", [1, 3, 4])
@pytest.mark.parametrize("ends", [True, False])
def test_targets_of_a_step_are_known_before_it(
    bert_folder: Path, text_file: Path, micro_batches: int, ends: bool
) -> None:
    """Also of the step at the epoch's end, which goes on into the next epoch or lacks packs."""
    module = LitEncoder(str(bert_folder), streams=PAIR)
    data = make_data(text_file, bert_folder, sequence_length=48, slots=192)
    plan = data.plans["train"]
    loader = plan.for_rank(Position(), 0, 1, micro_batches if ends else None)
    count = -(-plan.num_packs(0) // micro_batches) * micro_batches
    batches = [gather(plan.store, p, plan.affixes, 192, 48, 0) for p in itertools.islice(loader, count)]
    assert len(batches) == count
    for first in range(0, count, micro_batches):
        found = pieces(module, batches[first : first + micro_batches])
        real = [sum(n for _, stream, n in found if stream == which) for which in (0, 1)]
        assert module.dealer.step_counts(plan, batches[first], micro_batches, ends) == real


class Recorder(Callback):
    """Batches and gradients of each optimizer step."""

    def __init__(self) -> None:
        self.batches: list[list[PackedBatch]] = [[]]
        self.gradients: list[dict[str, torch.Tensor]] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: PackedBatch, batch_idx: int) -> None:
        self.batches[-1].append(batch)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        self.gradients.append({n: p.grad.clone() for n, p in pl_module.named_parameters() if p.grad is not None})
        self.batches.append([])


def by_definition(module: LitEncoder, batches: list[PackedBatch], aggregation: str) -> torch.Tensor:
    """The loss of a step, straight from the words: all logits at once, every target its own number."""
    backbone = module.backbone
    assert backbone is not None
    found: list[tuple[int, tuple[int, int], torch.Tensor]] = []
    for number, batch in enumerate(batches):
        members = module.dealer.members(batch)
        ratios = np.array([s.mask_ratio for s in module.streams])[members]
        targets = module.targets(batch, "mlm", mask_ratio=ratios, seed=module.seed, epoch=batch.here.epoch)
        hidden = backbone.encode(targets.input_ids, batch.position_ids, module.packing(batch, "mlm"))
        for row, label in zip(targets.rows.tolist(), targets.labels, strict=True):
            piece = int(batch.segment_ids[row])
            head = module.head_key(module.streams[members[piece]].head)
            loss = cross_entropy(backbone.logits(hidden[row : row + 1], head), label[None])
            found.append((int(members[piece]), (number, piece), loss))
    weights = [stream.weight for stream in module.streams]
    if aggregation == "tokens":
        parts = [([loss], weights[stream]) for stream, _, loss in found]
    elif aggregation == "streams":
        parts = [([x for s, _, x in found if s == stream], weights[stream]) for stream in {s for s, _, _ in found}]
    else:
        documents = {piece: stream for stream, piece, _ in found}
        parts = [([x for _, p, x in found if p == piece], weights[stream]) for piece, stream in documents.items()]
    means = [(torch.stack(losses).mean() * weight, weight) for losses, weight in parts]
    return torch.stack([mean for mean, _ in means]).sum() / sum(weight for _, weight in means)


@pytest.mark.parametrize("aggregation", ["tokens", "streams", "inputs"])
@pytest.mark.parametrize(
    "steps",
    [
        {"max_steps": 1},
        {"max_steps": 1, "accumulate_grad_batches": 2},
        {"max_epochs": 1, "accumulate_grad_batches": 2, "limit_train_batches": 3},
    ],
    ids=["one", "two", "short"],
)
def test_gradients_are_those_of_the_definition(
    quiet_bert: Path, text_file: Path, make_trainer: MakeTrainer, aggregation: Any, steps: dict[str, Any]
) -> None:
    """Over the whole optimizer step, a weight of 1/4 on one stream, heads of their own; R03: a short last step too."""
    module = LitEncoder(
        str(quiet_bert), streams=PAIR, aggregation=aggregation, dtype="float64", learning_rate=0.0, weight_decay=0.0
    )
    recorder = Recorder()
    data = TextDataModule(str(text_file), sequence_length=48, slots=96, val_share=0.1)
    trainer = make_trainer(**steps, callbacks=[recorder], limit_val_batches=0)
    trainer.fit(module, data)
    assert [len(batches) for batches in recorder.batches[:-1]] == ([2, 1] if len(steps) == 3 else [max(len(steps), 1)])
    for batches, gradients in zip(recorder.batches, recorder.gradients, strict=False):
        loss = by_definition(module, batches, aggregation)
        parameters = dict(module.named_parameters())
        expected = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        for (name, parameter), right in zip(parameters.items(), expected, strict=True):
            if right is None:
                assert name not in gradients or not gradients[name].any(), name
                continue
            tolerance = 1e-6 * float(right.abs().max()) + 1e-12
            torch.testing.assert_close(
                gradients[name], right, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
            )
            assert parameter.shape == right.shape


def test_whole_words_in_streams(bert_folder: Path, hundreds: Path, make_trainer: MakeTrainer) -> None:
    """M08: in this vocabulary every token is a word, so the counts are those of tokens."""
    module = LitEncoder(str(bert_folder), streams=[NARROW, WIDE], whole_words=True)
    data = make_data(hundreds, bert_folder, sequence_length=104, slots=550)
    (batch,) = itertools.islice(data.train_dataloader(), 1)
    found = pieces(module, [batch])
    assert [sum(n for _, stream, n in found if stream == which) for which in (0, 1)] == [20, 50]
    settings = {"max_steps": 2, "callbacks": [RunSummary()], "limit_val_batches": 0}
    trainer = make_trainer(**settings)
    trainer.fit(module, TextDataModule(str(hundreds), val=str(hundreds), sequence_length=104, slots=550))
    assert module.records()["streams"]["wide"]["targets"] == 2 * 50


def test_what_a_reproduction_has_to_record(
    bert_folder: Path, hundreds: Path, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    """Per stream: inputs, targets, loss; the aggregation by name. In the logs and in summary.json."""
    streams = [MaskStream("narrow", 0.05, 0.8, head="narrow"), MaskStream("wide", 0.5, 0.2, head="wide")]
    module = LitEncoder(str(bert_folder), streams=streams, aggregation="inputs")
    losses: list[tuple[float, float]] = []

    class Seen(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            values = trainer.callback_metrics
            losses.append((float(values["train/narrow/mlm_loss"]), float(values["train/wide/mlm_loss"])))

    trainer = make_trainer(max_steps=3, callbacks=[RunSummary(), Seen()], limit_val_batches=0)
    trainer.fit(module, TextDataModule(str(hundreds), val=str(hundreds), sequence_length=104, slots=550))
    logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
    assert [logged[f"train/{name}/targets"] for name in ("narrow", "wide")] == [20, 50]
    assert [logged[f"train/{name}/documents"] for name in ("narrow", "wide")] == [4, 1]
    pooled = (20 * logged["train/narrow/mlm_loss"] + 50 * logged["train/wide/mlm_loss"]) / 70
    assert logged["train/mlm_loss"] == pytest.approx(pooled, rel=1e-5)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["aggregation"] == "inputs"
    assert summary["streams"]["narrow"] | {"documents": 12, "targets": 60} == summary["streams"]["narrow"]
    assert (
        summary["streams"]["wide"] | {"documents": 3, "targets": 150, "mask_ratio": 0.5} == summary["streams"]["wide"]
    )
    # Every step has as many targets of a stream.
    for place, name in enumerate(("narrow", "wide")):
        mean = sum(step[place] for step in losses) / 3
        assert summary["streams"][name]["mlm_loss"] == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize(
    ("heads", "own", "added"),
    [
        ((None, None), None, []),
        ((None, "wide"), None, ["wide"]),
        (("narrow", None), None, ["narrow"]),
        (("both", "both"), "both", []),
        (("narrow", "wide"), "narrow", ["wide"]),
    ],
)
@pytest.mark.parametrize("tie_decoder", [True, False])
def test_a_head_per_name_the_first_of_which_is_the_model_s_own(
    bert_folder: Path, heads: tuple[Any, Any], own: str | None, added: list[str], tie_decoder: bool
) -> None:
    streams = [MaskStream("narrow", 0.1, 0.7, head=heads[0]), MaskStream("wide", 0.5, 0.3, head=heads[1])]
    module = LitEncoder(str(bert_folder), streams=streams, tie_decoder=tie_decoder)
    module.configure_model()
    assert module.backbone is not None
    assert module.main_head == own
    assert list(module.backbone.heads) == added
    for name in added:
        matrix, bias = module.backbone.decoder_parameters(name)
        assert (matrix is module.backbone.decoder.weight) == tie_decoder
        assert bias is not module.backbone.decoder.bias
        assert torch.equal(matrix, module.backbone.decoder.weight)


def test_streams_rest_during_a_detour(quiet_bert: Path, text_file: Path, make_trainer: MakeTrainer) -> None:
    """CLM steps have no streams: no counts, the added head bit-equal; after it they go on."""
    module = LitEncoder(str(quiet_bert), streams=PAIR, learning_rate=1e-2)
    heads, counts = [], []

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
            state = {n: p.detach().clone() for n, p in pl_module.backbone.heads.named_parameters()}
            heads.append((pl_module.objective, state))
            counts.append((pl_module.objective, "train/wide/targets" in pl_module.logged_losses))

    detour = CLMDetour(steps=4, decay_share=0.5, decay_mask_ratio=None, head_warmup_steps=2)
    data = TextDataModule(str(text_file), sequence_length=48, slots=192, val_share=0.1)
    make_trainer(callbacks=[detour, Watch()], limit_val_batches=0).fit(module, data)
    assert {logged == (objective == "mlm") for objective, logged in counts} == {True}
    for (_, before), (objective, after) in itertools.pairwise(heads):
        assert all(torch.equal(before[name], after[name]) for name in before) == (objective == "clm")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"streams": [NARROW]}, "model.streams must have shares that sum to 1, got 0.8"),
        (
            {"streams": PAIR, "aggregation": "sum"},
            "model.aggregation must be one of tokens, streams, inputs, got 'sum'",
        ),
        ({"streams": PAIR, "shares_of": "words"}, "model.shares_of must be one of documents, tokens, got 'words'"),
        ({"streams": [MaskStream("a", 0.1, 1.0, head="clm")]}, "must not name a head 'clm'"),
        ({"streams": PAIR, "aggregation": "streams", "whole_words": True}, "got 'streams'"),
        ({"streams": [MaskStream("a", 0.1, 1.0, distill=True)]}, "may distill only in a LitKD, .* got distill in 'a'"),
    ],
)
def test_settings_that_make_no_sense(bert_folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        LitMLM(str(bert_folder), **settings)
    assert "\n" not in str(caught.value)


def test_a_step_too_small_for_a_stream_is_refused_before_training(
    bert_folder: Path, hundreds: Path, make_trainer: MakeTrainer
) -> None:
    data = TextDataModule(str(hundreds), val=str(hundreds), sequence_length=104, slots=110)
    module = LitEncoder(str(bert_folder), streams=[NARROW, WIDE])
    with pytest.raises(ValueError, match=r"model.streams 'wide' must get at least one .* got 0.2 of 4.0 documents"):
        make_trainer(max_steps=1, accumulate_grad_batches=4).fit(module, data)
    make_trainer(max_steps=1, accumulate_grad_batches=5, limit_val_batches=0).fit(module, data)


def test_streams_from_a_checkpoint_are_those_of_the_run(
    bert_folder: Path, text_file: Path, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    """U09: plain types only."""
    module = LitEncoder(str(bert_folder), streams=PAIR, aggregation="inputs")
    trainer = make_trainer(max_steps=1, limit_val_batches=0)
    trainer.fit(module, TextDataModule(str(text_file), sequence_length=48, slots=192, val_share=0.1))
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    torch.load(tmp_path / "run.ckpt", weights_only=True)
    loaded = LitEncoder.load_from_checkpoint(tmp_path / "run.ckpt")
    assert loaded.streams == PAIR
    assert loaded.counted == module.counted
    assert loaded.aggregation == "inputs"


def test_a_phase_with_a_mask_ratio_is_refused_beside_streams(
    bert_folder: Path, text_file: Path, make_trainer: Any
) -> None:
    streams = [MaskStream("low", 0.1, 0.8), MaskStream("high", 0.5, 0.2)]
    data = TextDataModule(str(text_file), sequence_length=48, slots=512, val_share=0.1)
    trainer = make_trainer(callbacks=[CLMDetour(steps=4)])
    with pytest.raises(ValueError, match=r"phase 'decay' must have no mask ratio .* got 0\.15"):
        trainer.fit(LitMLM(str(bert_folder), streams=streams), data)
