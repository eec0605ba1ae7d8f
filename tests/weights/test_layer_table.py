"""The table of a model's ranges: every weight counted once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lit_encoders.weights.checkpoint import open_weights
from lit_encoders.weights.layer_table import layer_rows, layers_verb


@pytest.mark.parametrize("architecture", ["BertForMaskedLM", "BertModel", "GPT2LMHeadModel"])
def test_rows_add_up_to_the_model(make_model: Callable[..., Path], load: Any, architecture: str) -> None:
    small = {"vocab_size": 95, "n_embd": 16, "n_layer": 3, "n_head": 2, "bos_token_id": 2, "eos_token_id": 3}
    folder = make_model(architecture=architecture, **(small if architecture.startswith("GPT2") else {}))
    rows = layer_rows(open_weights(str(folder), "model"))
    model = load(folder)
    assert [label for label, *_ in rows if label[0].isdigit()] == ["0:1", "1:2", "2:3"]
    assert sum(count for *_, count, _ in rows) == len(list(model.parameters()))
    assert sum(size for *_, size in rows) == model.num_parameters()


def test_rows_of_bert(base: Path) -> None:
    embedding, layer = 95 * 32 + 128 * 32 + 2 * 32 + 2 * 32, 4 * (32 * 32 + 32) + 2 * 32 * 64 + 64 + 32 + 4 * 32
    assert layer_rows(open_weights(str(base), "model")) == [
        ("embeddings", "bert.embeddings.*", 5, embedding),
        *[(f"{n}:{n + 1}", f"bert.encoder.layer.{n}.*", 16, layer) for n in range(3)],
        ("head", "cls.predictions.*", 5, 95 + 32 * 32 + 32 + 2 * 32),
    ]


def test_table(base: Path) -> None:
    text = layers_verb(str(base))
    assert "BertForMaskedLM: 3 layers, " in text
    assert "bert.encoder.layer.2.*" in text
    assert "cls.predictions.decoder.weight is bert.embeddings.word_embeddings.weight (tied): it counts once" in text


def test_checkpoint_of_a_run(checkpoint: Path, bert_folder: Path) -> None:
    assert layers_verb(str(checkpoint)) == layers_verb(str(bert_folder))
