"""What keeps two models apart is said before anything is written, with both sides' figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_encoders.weights.alike import alike_as_stored, check_alike, listed
from lit_encoders.weights.checkpoint import open_stored, open_weights

MakeModel = Callable[..., Path]
LAYER = "bert.encoder.layer.0.intermediate.dense"


def check(ours: Path, other: Path, needed: set[str] | None = None) -> None:
    check_alike(open_weights(str(ours), "models"), [open_weights(str(other), "models")], needed)


def refused(ours: Path, other: Path, message: str) -> str:
    with pytest.raises(ValueError, match=message) as caught:
        check(ours, other)
    assert f"'{ours}'" in str(caught.value)
    assert f"'{other}'" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("count", [1, 10, 11, 30])
def test_at_most_ten_names_with_their_number(count: int) -> None:
    text = listed([f"n{number}" for number in range(count)])
    assert text.startswith(f"{count} tensor{'s' if count > 1 else ''}: n0")
    assert text.count("n") - text.split(":")[0].count("n") == min(count, 10)
    assert text.endswith(", ...") == (count > 10)


def test_like_models_pass(base: Path, tuned: Path) -> None:
    check(base, tuned)


def test_other_architecture(base: Path, make_model: MakeModel) -> None:
    sizes = {"vocab_size": 95, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "pad_token_id": 0}
    other = make_model(architecture="RobertaForMaskedLM", intermediate_size=64, max_position_embeddings=128, **sizes)
    refused(base, other, "models must have one architecture, got bert and roberta in")


def test_other_vocabulary(base: Path, make_model: MakeModel) -> None:
    refused(base, make_model(vocab_size=96), "models must have one vocabulary, got vocab_size 95 and 96 in")


def test_vocabulary_of_the_same_size_with_other_tokens(base: Path, edited: Callable[..., Path]) -> None:
    other = edited(base, {})
    rules = json.loads((other / "tokenizer.json").read_text())
    words = rules["model"]["vocab"]
    words["w1"], words["w2"] = words["w2"], words["w1"]
    (other / "tokenizer.json").write_text(json.dumps(rules))
    refused(base, other, "models must have one vocabulary, got 95 and 95 tokens, 2 under another id, in")


def test_tokenizer_that_is_only_written_otherwise_passes(base: Path, edited: Callable[..., Path]) -> None:
    other = edited(base, {})
    rules = json.loads((other / "tokenizer.json").read_text())
    (other / "tokenizer.json").write_text(json.dumps(rules, indent=7))
    check(base, other)


def test_model_without_a_tokenizer_is_taken_as_it_is(base: Path, make_model: MakeModel) -> None:
    check(base, make_model(with_tokenizer=False))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_hidden_layers": 2}, "the same number of layers, got num_hidden_layers 3 and 2 in"),
        ({"hidden_size": 16}, "the same hidden size, got hidden_size 32 and 16 in"),
        ({"tie_word_embeddings": False}, "both tie their embeddings or neither, got tied and untied in"),
    ],
)
def test_other_sizes(base: Path, make_model: MakeModel, settings: dict[str, Any], message: str) -> None:
    refused(base, make_model(**settings), message)


def test_other_shapes(base: Path, make_model: MakeModel) -> None:
    other = make_model(intermediate_size=48)
    text = refused(base, other, r"tensors of the same shapes, got \[64, 32\] and \[48, 32\] for ")
    assert LAYER in text
    assert "(9 tensors: " in text


def test_missing_and_extra_tensors(base: Path, edited: Callable[..., Path]) -> None:
    fewer = edited(base, {f"{LAYER}.weight": None})
    with pytest.raises(ValueError, match=f"'{fewer}' must hold the tensors of '{base}', lacks 1 tensor: {LAYER}.wei"):
        check(base, fewer)
    with pytest.raises(ValueError, match=f"'{base}' must hold the tensors of '{fewer}' alone, has 1 tensor: {LAYER}"):
        check(fewer, base)
    check(base, fewer, {f"{LAYER}.bias"})
    check(fewer, base, {f"{LAYER}.bias"})
    more: dict[str, Tensor | None] = {f"more.{number:02}": torch.zeros(1) for number in range(12)}
    with pytest.raises(ValueError, match=r"alone, has 12 tensors: more\.00, .*, more\.09, \.\.\.$"):
        check(base, edited(base, more))


def test_w04_one_renamed_key(
    base: Path, edited: Callable[..., Path], tensors: Callable[..., dict[str, Tensor]]
) -> None:
    renamed = edited(base, {f"{LAYER}.weight": None, f"{LAYER}.kernel": tensors(base)[f"{LAYER}.weight"]})
    with pytest.raises(ValueError, match=f"lacks 1 tensor: {LAYER}.weight"):
        check(base, renamed)


def test_facts_that_say_nothing_of_a_model(base: Path, tuned: Path, edited: Callable[..., Path]) -> None:
    names = {"_name_or_path": "x", "transformers_version": "4.0", "dtype": "float64", "architectures": ["BertModel"]}
    others = {"same": (edited(base, {}, names), True), "layers": (edited(base, {}, {"hidden_act": "relu"}), False)}
    for other, same in [*others.values(), (tuned, True), (edited(base, {"more": torch.zeros(1)}), False)]:
        assert alike_as_stored([open_stored(str(folder), "models") for folder in (base, other)]) == same
