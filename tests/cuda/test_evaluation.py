"""Models are measured on the GPU, and say there what they say on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lit_encoders.evaluation.embeddings import embed, embed_layers
from lit_encoders.evaluation.finetuning import Example, FineTuning, fine_tune
from lit_encoders.evaluation.language_modeling import language_scores
from lit_encoders.modules.open_module import open_module

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

TEXTS = ["w1 w2 w3", "w4 " * 60, "w5", "w6 w7 " * 20]


def test_embeddings_and_losses_are_those_of_the_cpu(bert_folder: Path) -> None:
    there, here = open_module(str(bert_folder), on_gpu=True), open_module(str(bert_folder))
    for measured in (
        lambda module: embed(module, TEXTS, sequence_length=64),
        lambda module: embed_layers(module, TEXTS, sequence_length=64),
    ):
        torch.testing.assert_close(measured(there), measured(here), atol=1e-4, rtol=1e-4)
    assert there.backbone is not None
    assert next(there.backbone.parameters()).is_cuda
    losses = [
        language_scores(module, TEXTS, sequence_length=64, mask_ratio=0.5).value("loss") for module in (there, here)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_fine_tuning_ends_where_it_is_measured(bert_folder: Path) -> None:
    examples = [Example(((2, 5 + place % 2, 3),), (place % 2,)) for place in range(32)]
    settings = FineTuning(epochs=5, batch=8, learning_rate=1e-3, sequence_length=8)
    tuner = fine_tune(lambda: open_module(str(bert_folder), on_gpu=True), examples, 2, settings, seed=0)
    assert tuner.head is not None
    said = tuner.head(embed(tuner.encoder, ["w0", "w1"], sequence_length=8)).argmax(1)
    assert said.tolist() == [0, 1]
