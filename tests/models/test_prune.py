"""Pruned models are what their sizes say, compute the same packed as in plain transformers, and keep what counts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from lit_encoders.models.attention import ATTENTION_NAME, PackLayout
from lit_encoders.models.backbone import Backbone, load_config, load_language_model
from lit_encoders.models.prune import Sizes, Statistics, block_influence, keep_largest, prune, watch

VOCAB, LAYERS, LENGTHS = 95, 4, np.array([3, 7, 30])
SMALL = {"hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 8, "intermediate_size": 48}
IDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
LOCAL = ["sliding_attention", "full_attention"] * 2
SETTINGS: dict[str, dict[str, Any]] = {
    "bert": SMALL,
    "camembert": {**SMALL, "pad_token_id": 1, "max_position_embeddings": 66},
    "electra": {**SMALL, "embedding_size": 16},
    "modernbert": {**SMALL, **IDS, "local_attention": 8, "global_attn_every_n_layers": 2},
    "roberta": {**SMALL, "pad_token_id": 1, "max_position_embeddings": 66},
    "ultrabert": {
        **SMALL, **IDS, "num_key_value_heads": 4, "head_dim": 8, "sliding_window": 6, "layer_types": LOCAL,
        "prediction_head_size": 24,
    },
    "xlm-roberta": {**SMALL, "pad_token_id": 1, "max_position_embeddings": 66},
}  # fmt: skip


def make_model(name: str, **settings: Any) -> Any:
    if name not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"this version of transformers has no {name}")
    config = {"model_type": name, "vocab_size": VOCAB, "max_position_embeddings": 64, **SETTINGS[name], **settings}
    torch.manual_seed(0)
    model = load_language_model(config, load_config(config), torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)  # Norms and biases that are not 1 and 0.
    return model


def ids(count: int = int(LENGTHS.sum())) -> Tensor:
    return torch.randint(5, VOCAB, (count,), generator=torch.Generator().manual_seed(1))


def packed_logits(model: Any) -> Tensor:
    positions = torch.cat([torch.arange(length) for length in LENGTHS.tolist()])
    backbone = Backbone(model)
    with torch.no_grad():
        return backbone.logits(backbone.encode(ids(), positions, PackLayout(LENGTHS)))


def statistics_of(model: Any) -> Statistics:
    with watch(model) as statistics:
        packed_logits(model)
    return statistics


def plain_logits(model: Any, folder: Path) -> Tensor:
    """Saved, loaded in plain transformers without a missing key, each document alone."""
    from transformers import AutoModelForMaskedLM

    model.save_pretrained(folder)
    plain, report = AutoModelForMaskedLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="sdpa", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        return torch.cat([plain.eval()(part[None]).logits[0] for part in ids().split(LENGTHS.tolist())])


EVERY = [(name, sizes) for name in SETTINGS for sizes in (Sizes(layers=2), Sizes(layers=[0, 3]), Sizes(mlp=20))]
EVERY += [("ultrabert", sizes) for sizes in (Sizes(heads=4), Sizes(hidden=24), Sizes(2, 4, 20, 16))]


@pytest.mark.parametrize(("name", "sizes"), EVERY, ids=lambda value: value if isinstance(value, str) else repr(value))
def test_pruned_packed_equals_pruned_in_plain_transformers(name: str, sizes: Sizes, tmp_path: Path) -> None:
    model = make_model(name)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    small = prune(model, sizes, statistics_of(model))
    small.set_attn_implementation(ATTENTION_NAME)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())
    # Some norms go through float32 whatever the model's type.
    torch.testing.assert_close(packed_logits(small), plain_logits(small, tmp_path), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    config, layers = small.config, Backbone(small).layers
    assert len(layers) == config.num_hidden_layers == (LAYERS if sizes.layers is None else 2)
    assert config.intermediate_size == (sizes.mlp or 48)
    assert config.hidden_size == (sizes.hidden or 32)
    assert config.num_attention_heads == (sizes.heads or 8)


@pytest.mark.parametrize("name", SETTINGS)
def test_pruning_to_the_sizes_there_are_changes_nothing(name: str) -> None:
    model = make_model(name)
    more = {"heads": 8, "hidden": 32} if name == "ultrabert" else {}
    same = prune(model, Sizes(layers=LAYERS, mlp=48, **more), statistics_of(model))
    same.set_attn_implementation(ATTENTION_NAME)
    torch.testing.assert_close(packed_logits(same), packed_logits(model), rtol=1e-12, atol=1e-12)
    for key, tensor in same.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[key]), key


@pytest.mark.parametrize("name", SETTINGS)
def test_what_does_nothing_is_taken_first(name: str) -> None:
    """Neurons whose output weights are not read anyway: silent ones, and a layer that hands on its input."""
    model = make_model(name)
    layers = Backbone(model).layers
    module = {"modernbert": "mlp.Wo", "ultrabert": "mlp.down_proj"}.get(name, "output.dense")
    inner = {"modernbert": ["mlp.Wi"], "ultrabert": ["mlp.gate_proj", "mlp.up_proj"]}.get(name, ["intermediate.dense"])
    silent = torch.arange(0, 48, 2)
    with torch.no_grad():
        for layer in layers:
            for path in inner:
                linear = layer.get_submodule(path)
                for parameter in linear.parameters():
                    parameter[silent] = 0.0  # An activation of 0 is 0 for gelu and silu.
            assert layer.get_submodule(module).weight.shape[1] == 48
    expected = packed_logits(model)
    small = prune(model, Sizes(mlp=24), statistics_of(model))
    small.set_attn_implementation(ATTENTION_NAME)
    torch.testing.assert_close(packed_logits(small), expected, rtol=1e-9, atol=1e-9)


def test_silent_heads_are_taken_first_with_their_key_head() -> None:
    """Eight queries to four keys: the two of one key stay together."""
    model = make_model("ultrabert")
    with torch.no_grad():
        for number, layer in enumerate(Backbone(model).layers):
            layer.self_attn.v_proj.weight.view(4, 8, 32)[[number % 4, (number + 2) % 4]] = 0.0
    expected = packed_logits(model)
    small = prune(model, Sizes(heads=4), statistics_of(model))
    small.set_attn_implementation(ATTENTION_NAME)
    assert (small.config.num_attention_heads, small.config.num_key_value_heads, small.config.head_dim) == (4, 2, 8)
    torch.testing.assert_close(packed_logits(small), expected, rtol=1e-9, atol=1e-9)


def test_a_layer_that_hands_on_its_input_is_taken_first() -> None:
    model = make_model("ultrabert", layer_types=["full_attention"] * LAYERS)
    with torch.no_grad():
        for number in (1, 2):
            layer = Backbone(model).layers[number]
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    statistics = statistics_of(model)
    assert statistics.influence[1:3].tolist() == pytest.approx([0.0, 0.0], abs=1e-9)
    small = prune(model, Sizes(layers=2), statistics)
    small.set_attn_implementation(ATTENTION_NAME)
    torch.testing.assert_close(packed_logits(small), packed_logits(model), rtol=1e-12, atol=1e-12)


def test_the_hidden_dimensions_with_the_largest_norms_stay() -> None:
    model = make_model("ultrabert")
    statistics = statistics_of(model)
    assert statistics.hidden is not None
    small = prune(model, Sizes(hidden=16), statistics)
    kept = sorted(np.argsort(-statistics.hidden.numpy(), kind="stable")[:16].tolist())
    assert torch.equal(small.get_input_embeddings().weight, model.get_input_embeddings().weight[:, kept])
    layer, whole = Backbone(small).layers[1], Backbone(model).layers[1]
    assert torch.equal(layer.self_attn.q_proj.weight, whole.self_attn.q_proj.weight[:, kept])
    assert torch.equal(layer.self_attn.o_proj.weight, whole.self_attn.o_proj.weight[kept])
    assert torch.equal(layer.input_layernorm.weight, whole.input_layernorm.weight[kept])


def test_block_influence_is_one_minus_the_cosine() -> None:
    """A turn by an angle gives 1 - cos(angle), whatever the length; summed over tokens."""
    angles = torch.tensor([0.0, 0.3, math.pi / 2, math.pi], dtype=torch.float64)
    before = torch.tensor([[2.0, 0.0]], dtype=torch.float64).expand(4, 2)
    after = 5 * torch.stack([angles.cos(), angles.sin()], dim=1)
    assert block_influence(before, after).item() == pytest.approx(0 + (1 - math.cos(0.3)) + 1 + 2)


def test_statistics_equal_those_of_hidden_states() -> None:
    """From plain transformers' hidden states, by NumPy."""
    model = make_model("bert")
    statistics = statistics_of(model)
    assert not any(layer._forward_hooks for layer in Backbone(model).layers)
    model.set_attn_implementation("sdpa")
    influence = np.zeros(LAYERS)
    with torch.no_grad():
        for part in ids().split(LENGTHS.tolist()):
            states = [x[0].numpy() for x in model(part[None], output_hidden_states=True).hidden_states]
            for number, (a, b) in enumerate(itertools.pairwise(states)):
                cosine = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
                influence[number] += (1 - cosine).sum()
    assert statistics.influence.numpy() == pytest.approx(influence, rel=1e-6)
    assert statistics.tokens == LENGTHS.sum()


def test_of_equals_the_first_stay() -> None:
    assert keep_largest(torch.zeros(5), 3).tolist() == [0, 1, 2]


def test_an_untied_decoder_is_pruned_as_itself(tmp_path: Path) -> None:
    model = make_model("ultrabert", tie_word_embeddings=False)
    small = prune(model, Sizes(hidden=24), statistics_of(model))
    small.set_attn_implementation(ATTENTION_NAME)
    assert not torch.equal(small.get_output_embeddings().weight, small.get_input_embeddings().weight)
    torch.testing.assert_close(packed_logits(small), plain_logits(small, tmp_path), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("bert", Sizes(layers=5), "layers must be between 1 and the model's 4, got 5"),
        ("bert", Sizes(layers=0), "layers must be between 1 and the model's 4, got 0"),
        ("bert", Sizes(layers=[2, 1]), r"layers must be numbers below 4 in ascending order, each once, got \[2, 1\]"),
        ("bert", Sizes(layers=[1, 4]), r"layers must be numbers below 4 .* got \[1, 4\]"),
        ("bert", Sizes(layers=[]), r"layers must be numbers below 4 .* got \[\]"),
        ("modernbert", Sizes(layers=[1, 2]), r"layers of a modernbert must hold layer 0, .* got \[1, 2\]"),
        ("bert", Sizes(mlp=49), "mlp must be between 1 and the model's 48, got 49"),
        ("bert", Sizes(hidden=16), "hidden can be pruned for ultrabert alone, got 16 for bert"),
        ("bert", Sizes(heads=4), "heads of a bert must stay 8: .* got 4"),
        ("modernbert", Sizes(heads=4), "heads of a modernbert must stay 8: .* got 4"),
        ("ultrabert", Sizes(heads=3), r"heads must be a multiple of 2 \(queries to a key head\) up to 8, got 3"),
        ("ultrabert", Sizes(heads=10), "heads must be a multiple of 2 .* got 10"),
        ("ultrabert", Sizes(hidden=31), "hidden must be a multiple of the 8 heads, got 31"),
        ("ultrabert", Sizes(heads=6), "hidden must be a multiple of the 6 heads, got 32"),
        ("ultrabert", Sizes(hidden=33), "hidden must be between 1 and the model's 32, got 33"),
    ],
)
def test_sizes_that_cannot_be(name: str, sizes: Sizes, message: str) -> None:
    model = make_model(name)
    with pytest.raises(ValueError, match=message) as caught:
        prune(model, sizes, statistics_of(model))
    assert "\n" not in str(caught.value)


def test_a_family_that_cannot_be_pruned(build_backbone: Callable[..., Backbone]) -> None:
    settings = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB}
    model = load_language_model(settings, load_config(settings), torch.float32)
    with pytest.raises(ValueError, match=r"must be of a family that can be pruned .* got 'gpt2'"), watch(model):
        pass
