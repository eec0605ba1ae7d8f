"""Every listed architecture, packed, equals its own documents run alone through plain transformers, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from lit_encoders.models.attention import ATTENTION_NAME, PackLayout
from lit_encoders.models.backbone import ARCHITECTURES, Backbone, load_config, load_language_model, max_positions

VOCAB = 95
WINDOW = 9
# Twice one length, one above and several below the window; together more than the models have positions.
LENGTHS = np.array([3, 7, 7, 30, 47])
SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 8}
IDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
LOCAL = ["sliding_attention", "full_attention", "sliding_attention"]
SETTINGS: dict[str, dict[str, Any]] = {
    "bert": SMALL,
    "camembert": {**SMALL, "pad_token_id": 1, "max_position_embeddings": 66},
    "distilbert": {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48},
    "electra": {**SMALL, "embedding_size": 16},
    "eurobert": {**GROUPED, **IDS},
    "gemma3_text": {**GROUPED, **IDS, "sliding_window": WINDOW, "layer_types": LOCAL, "query_pre_attn_scalar": 8},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "bos_token_id": 2, "eos_token_id": 3},
    "llama": {**GROUPED, **IDS},
    "modernbert": {**SMALL, **IDS, "local_attention": 2 * (WINDOW - 1), "global_attn_every_n_layers": 2},
    "modernbert-decoder": {**SMALL, **IDS, "local_attention": 2 * WINDOW, "global_attn_every_n_layers": 2},
    "nomic_bert": {**SMALL, **IDS},
    "qwen3": {**GROUPED, **IDS},
    "roberta": {**SMALL, "pad_token_id": 1, "max_position_embeddings": 66},
    "ultrabert": {**GROUPED, **IDS, "sliding_window": WINDOW - 1, "layer_types": LOCAL, "prediction_head_size": 24},
    "xlm-roberta": {**SMALL, "pad_token_id": 1, "max_position_embeddings": 66},
}
DECODERS = {"gemma3_text", "gpt2", "llama", "modernbert-decoder", "qwen3"}


def make_backbone(name: str) -> Backbone:
    if name not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"this version of transformers has no {name}")
    config = {"model_type": name, "vocab_size": VOCAB, "max_position_embeddings": 64, **SETTINGS[name]}
    torch.manual_seed(0)
    model = load_language_model(config, load_config(config), torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)  # Norms and biases that are not 1 and 0.
    return Backbone(model)


def plain_logits(model: Any, ids: torch.Tensor, causal: bool, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """One document through plain transformers, with the masks of a direction given explicitly."""
    place = torch.arange(len(ids))
    distance = place[:, None] - place[None]
    full = (distance >= 0) if causal else torch.ones_like(distance, dtype=torch.bool)
    masks = {"full_attention": full[None, None], "sliding_attention": (full & (distance.abs() < WINDOW))[None, None]}
    kind = model.config.model_type
    if kind == "ultrabert":  # Takes one mask for both kinds of layer: hand each its own.
        home = "transformers.models.ultrabert.modeling_ultrabert"
        monkeypatch.setattr(f"{home}.create_bidirectional_mask", lambda **_: masks["full_attention"])
        monkeypatch.setattr(f"{home}.create_bidirectional_sliding_window_mask", lambda **_: masks["sliding_attention"])
        return model(ids[None]).logits[0]
    by_layer = kind in {"gemma3_text", "modernbert", "modernbert-decoder", "qwen3"}
    settings = {"use_cache": False} if kind in DECODERS else {}
    mask = masks if by_layer else masks["full_attention"]
    return model(ids[None], attention_mask=mask, **settings).logits[0]


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_c03_c04_packed_equals_alone(name: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Some norms and rotations go through float32 whatever the model's type, in both computations alike.
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x if x.is_floating_point() else x.double())
    backbone = make_backbone(name)
    model = backbone.model
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, VOCAB, (int(LENGTHS.sum()),), generator=generator)
    weights = torch.randn(len(ids), VOCAB, generator=generator, dtype=torch.float64)
    positions = torch.cat([torch.arange(length) for length in LENGTHS.tolist()])

    packed = backbone.logits(backbone.encode(ids, positions, PackLayout(LENGTHS, causal=causal)))
    (packed * weights).sum().backward()
    gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(model.parameters()))

    model.zero_grad()
    model.set_attn_implementation("sdpa")
    alone = [plain_logits(model, part, causal, monkeypatch) for part in ids.split(LENGTHS.tolist())]
    (torch.cat(alone) * weights).sum().backward()
    model.set_attn_implementation(ATTENTION_NAME)

    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-9, atol=1e-9)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(
            gradients[key], parameter.grad, rtol=1e-9, atol=1e-9, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - DECODERS))
def test_c07_bidirectional_equals_plain_without_any_mask(name: str) -> None:
    """No mask and no position ids from us: windows and first positions are the model's own."""
    backbone = make_backbone(name)
    ids = torch.randint(5, VOCAB, (47,), generator=torch.Generator().manual_seed(2))
    layout = PackLayout(np.array([47]))
    packed = backbone.logits(backbone.encode(ids, torch.arange(47), layout))
    backbone.model.set_attn_implementation("sdpa")
    torch.testing.assert_close(packed, backbone.model(ids[None]).logits[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", sorted(DECODERS))
def test_causal_equals_a_plain_decoder_without_any_mask(name: str) -> None:
    backbone = make_backbone(name)
    ids = torch.randint(5, VOCAB, (47,), generator=torch.Generator().manual_seed(2))
    packed = backbone.logits(backbone.encode(ids, torch.arange(47), PackLayout(np.array([47]), causal=True)))
    backbone.model.set_attn_implementation("sdpa")
    torch.testing.assert_close(packed, backbone.model(ids[None], use_cache=False).logits[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_layers_and_positions_are_found(name: str) -> None:
    backbone = make_backbone(name)
    assert len(backbone.layers) == 3
    assert max_positions(backbone.config) == 64


def test_an_untied_decoder_is_kept() -> None:
    config = {"model_type": "llama", "vocab_size": VOCAB, **GROUPED, **IDS, "tie_word_embeddings": False}
    backbone = Backbone(load_language_model(config, load_config(config), torch.float32))
    embedding = backbone.model.get_input_embeddings().weight
    assert backbone.decoder.weight.data_ptr() != embedding.data_ptr()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "deberta-v2"}, "whose documents can be packed .* got 'deberta-v2'"),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, "no final_logit_softcapping, got 30.0"),
    ],
)
def test_models_that_cannot_be_packed(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(config)


def test_the_text_tower_of_a_model_that_also_sees(tmp_path: Path) -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {**GROUPED, "vocab_size": VOCAB}
    vision = {**SMALL, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    tokens = {"image_token_index": 94, "boi_token_index": 93, "eoi_token_index": 92, "mm_tokens_per_image": 4}
    whole = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision, **tokens))
    whole.save_pretrained(tmp_path)
    tower = load_language_model(str(tmp_path), load_config(str(tmp_path)), torch.float32)
    assert type(tower).__name__ == "Gemma3ForCausalLM"
    expected = whole.model.language_model.state_dict()
    for name, tensor in tower.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
