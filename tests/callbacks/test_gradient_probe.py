"""GradientProbe: the two vectors of the paper's example, gradients by hand, and a run that it does not change."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.nn.functional import cross_entropy

from lit_encoders import LitEncoder, LitKD, LitMLM, MaskStream, TextDataModule
from lit_encoders.callbacks import CLMDetour, GradientProbe
from lit_encoders.callbacks.gradient_probe import compare, gradient_products
from lit_encoders.data.packs import PackedBatch

MakeTrainer = Callable[..., Trainer]
STREAMS = [MaskStream("narrow", 0.1, 0.7, head="narrow"), MaskStream("wide", 0.5, 0.3, weight=0.25, head="wide")]


@pytest.fixture
def data(text_file: Path) -> TextDataModule:
    return TextDataModule(str(text_file), sequence_length=48, slots=192, val_share=0.1)


def test_gradients_that_cancel() -> None:
    """(1, 0) and (-1, 1): norms 1 and sqrt(2), cosine -1/sqrt(2), and (0, 1) is left of them, of norm 1."""
    products = gradient_products(
        {"a": [torch.tensor([1.0]), torch.tensor([0.0])], "b": [torch.tensor([-1.0]), torch.ones(1)]}
    )
    found = compare(["a", "b"], products)
    assert found == pytest.approx({"a/norm": 1.0, "b/norm": math.sqrt(2), "a~b/cosine": -math.sqrt(0.5)})
    assert products.sum().sqrt().item() == pytest.approx(1.0)


def test_three_gradients_equal_numpy() -> None:
    draw = np.random.default_rng(0)
    vectors = draw.normal(size=(3, 50))
    parts = {
        name: [torch.tensor(v[:20].reshape(4, 5)), torch.tensor(v[20:])] for name, v in zip("abc", vectors, strict=True)
    }
    found = compare(list("abc"), gradient_products(parts))
    for i, name in enumerate("abc"):
        assert found[f"{name}/norm"] == pytest.approx(np.linalg.norm(vectors[i]))
    for i, j in itertools.combinations(range(3), 2):
        cosine = vectors[i] @ vectors[j] / np.linalg.norm(vectors[i]) / np.linalg.norm(vectors[j])
        assert found[f"{'abc'[i]}~{'abc'[j]}/cosine"] == pytest.approx(cosine)


def test_a_gradient_of_zero_has_cosine_zero() -> None:
    found = compare(["a", "b"], gradient_products({"a": [torch.zeros(3)], "b": [torch.ones(3)]}))
    assert found == pytest.approx({"a/norm": 0.0, "b/norm": math.sqrt(3), "a~b/cosine": 0.0})


class Batches(Callback):
    def __init__(self) -> None:
        self.seen: list[PackedBatch] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: PackedBatch, batch_idx: int) -> None:
        self.seen.append(batch)


def by_hand(module: LitEncoder, batches: list[PackedBatch], wanted: Callable[[str], bool]) -> dict[str, list[Tensor]]:
    """Of each stream the gradient of a step on its targets alone, divided as the whole step is (pooled targets)."""
    backbone = module.backbone
    assert backbone is not None
    losses, divisor = {stream.name: torch.zeros((), dtype=torch.float64) for stream in module.streams}, 0.0
    for batch in batches:
        members = module.dealer.members(batch)
        targets = module.targets(
            batch, "mlm", mask_ratio=module.dealer.ratios(members), seed=module.seed, epoch=batch.here.epoch
        )
        of_target = torch.from_numpy(members)[batch.segment_ids[targets.rows]]
        hidden = backbone.encode(targets.input_ids, batch.position_ids, module.packing(batch, "mlm"))
        for number, stream in enumerate(module.streams):
            mine = of_target == number
            logits = backbone.logits(hidden[targets.rows[mine]], module.head_key(stream.head))
            losses[stream.name] = losses[stream.name] + stream.weight * cross_entropy(
                logits, targets.labels[mine], reduction="sum"
            )
            divisor += stream.weight * int(mine.sum())
    parameters = [p for name, p in module.named_parameters() if wanted(name)]
    return {
        name: list(torch.autograd.grad(loss / divisor, parameters, retain_graph=True)) for name, loss in losses.items()
    }


@pytest.mark.parametrize("accumulate", [1, 2])
def test_norms_and_cosines_are_those_of_steps_on_one_stream_alone(
    quiet_bert: Path, data: TextDataModule, make_trainer: MakeTrainer, accumulate: int
) -> None:
    module = LitEncoder(str(quiet_bert), streams=STREAMS, dtype="float64", learning_rate=0.0, weight_decay=0.0)
    probe, batches = GradientProbe(every_n_steps=2, layers=["0:2", "embeddings"]), Batches()
    settings = {"max_steps": 2, "accumulate_grad_batches": accumulate, "limit_val_batches": 0}
    trainer = make_trainer(callbacks=[probe, batches], **settings)
    trainer.fit(module, data)
    logged = {n: v.item() for n, v in trainer.callback_metrics.items() if n.startswith("gradient/")}
    expected = {}
    places: dict[str, Callable[[str], bool]] = {
        "": lambda name: ".encoder.layer." in name or ".embeddings." in name,
        "0:2/": lambda name: any(f".encoder.layer.{number}." in name for number in (0, 1)),
        "embeddings/": lambda name: ".embeddings." in name,
    }
    for place, wanted in places.items():
        found = by_hand(module, batches.seen[accumulate:], wanted)
        a, b = (torch.cat([x.flatten() for x in gradient]) for gradient in found.values())
        expected |= {
            f"gradient/{place}narrow/norm": a.norm().item(),
            f"gradient/{place}wide/norm": b.norm().item(),
            f"gradient/{place}narrow~wide/cosine": torch.cosine_similarity(a, b, dim=0).item(),
        }
    assert logged == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_probed_run_ends_bit_equal(
    bert_folder: Path, text_file: Path, make_trainer: MakeTrainer, accumulate: int
) -> None:
    """Dropout on, clipped, a teacher asked, a detour within."""
    taught = [MaskStream("narrow", 0.1, 0.7, distill=True, head="narrow"), STREAMS[1]]
    states, names = [], set()
    for probes in ([], [GradientProbe(every_n_steps=2)]):
        module = LitKD(str(bert_folder), str(bert_folder), streams=taught, aggregation="streams", learning_rate=1e-2)
        detour = CLMDetour(steps=3, decay_share=0.5, decay_mask_ratio=None, head_warmup_steps=2)
        trainer = make_trainer(
            callbacks=[detour, *probes],
            accumulate_grad_batches=accumulate,
            gradient_clip_val=0.5,
            limit_val_batches=0,
        )
        trainer.fit(module, TextDataModule(str(text_file), sequence_length=48, slots=192, val_share=0.1))
        states.append(module.state_dict())
        names = {name for name in trainer.callback_metrics if name.startswith("gradient/")}
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    parts = ["narrow", "narrow.mlm", "narrow.kd", "wide"]
    assert names == {f"gradient/{part}/norm" for part in parts} | {
        f"gradient/{a}~{b}/cosine" for a, b in itertools.combinations(parts, 2)
    }


def test_only_measured_steps_are_logged(
    bert_folder: Path, data: TextDataModule, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    logger = CSVLogger(tmp_path)
    module = LitEncoder(str(bert_folder), streams=STREAMS)
    make_trainer(max_steps=5, callbacks=[GradientProbe(2)], logger=logger, limit_val_batches=0).fit(module, data)
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").open()))
    assert [bool(row["gradient/wide/norm"]) for row in rows if row["train/mlm_loss"]] == [
        False,
        True,
        False,
        True,
        False,
    ]


def test_what_it_cannot_probe(
    bert_folder: Path, data: TextDataModule, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"GradientProbe.every_n_steps must be at least 1, got 0"):
        GradientProbe(every_n_steps=0)
    with pytest.raises(TypeError, match="GradientProbe needs a LitEncoder with streams, got LitMLM without"):
        make_trainer(max_steps=1, callbacks=[GradientProbe()]).fit(LitMLM(str(bert_folder)), data)
    module = LitEncoder(str(bert_folder), streams=STREAMS)
    logging = {"log_every_n_steps": 2, "logger": CSVLogger(tmp_path)}
    with pytest.raises(ValueError, match=r"every_n_steps must be a multiple of .*log_every_n_steps \(2\), got 3"):
        make_trainer(max_steps=1, callbacks=[GradientProbe(3)], **logging).fit(module, data)
    with pytest.raises(ValueError, match="7:9"):
        make_trainer(max_steps=1, callbacks=[GradientProbe(layers="7:9")]).fit(module, data)
