"""Tiny encoders in float64, beside the same weights in plain transformers."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_encoders.models.backbone import Backbone, load_config, load_language_model

SHARED = {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": 95, "pad_token_id": 0}
SETTINGS: dict[str, dict[str, Any]] = {
    "bert": {
        **SHARED,
        "model_type": "bert",
        "num_hidden_layers": 3,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
    },
    # Layers: full, window, window, full; a window layer reaches 8 tokens to each side.
    "modernbert": {
        **SHARED,
        "model_type": "modernbert",
        "num_hidden_layers": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 256,
        "local_attention": 16,
        "global_attn_every_n_layers": 3,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "cls_token_id": 2,
        "sep_token_id": 3,
    },
}


class Alone:
    """Plain transformers with the same weights, given one document at a time."""

    def __init__(self, backbone: Backbone) -> None:
        from transformers import AutoModelForMaskedLM

        # A copy: the attention of a model is an entry of its configuration object.
        config = deepcopy(backbone.config)
        self.model: nn.Module = AutoModelForMaskedLM.from_config(
            config, dtype=torch.float64, attn_implementation="sdpa"
        )
        self.model.load_state_dict(backbone.model.state_dict())
        self.model.train(backbone.training)

    def masks(self, length: int, causal: bool) -> dict[str, Any]:
        if not causal:
            return {}
        order = torch.arange(length)
        distance = order[:, None] - order[None]
        past = (distance >= 0)[None, None]
        if self.model.config.model_type != "modernbert":
            return {"attention_mask": past}
        near = (distance.abs() <= 8)[None, None]
        return {"attention_mask": {"full_attention": past, "sliding_attention": past & near}}

    def logits(self, ids: Tensor, causal: bool) -> Tensor:
        """Logits (L, V) of one document."""
        return self.model(ids[None], **self.masks(len(ids), causal)).logits[0]  # type: ignore[no-any-return]


@pytest.fixture(params=["bert", "modernbert"])
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(SETTINGS[request.param])


@pytest.fixture
def bert_settings() -> dict[str, Any]:
    return dict(SETTINGS["bert"])


@pytest.fixture
def modernbert_settings() -> dict[str, Any]:
    return dict(SETTINGS["modernbert"])


def build(settings: dict[str, Any], dtype: torch.dtype = torch.float64) -> Backbone:
    config = load_config(settings)
    torch.manual_seed(0)
    backbone = Backbone(load_language_model(settings, config, dtype))
    # Norms and biases start at 1 and 0: moved, so that none of them can be forgotten.
    for parameter in backbone.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, mean=0.5, std=0.2)
    return backbone.eval()


@pytest.fixture
def backbone(settings: dict[str, Any]) -> Backbone:
    return build(settings)


@pytest.fixture
def build_backbone() -> Any:
    return build


@pytest.fixture
def alone(backbone: Backbone) -> Alone:
    return Alone(backbone)
