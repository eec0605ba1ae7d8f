"""The stack of blocks of any module."""

from pathlib import Path

import pytest
import torch
from torch import nn

from lit_encoders.models.backbone import Backbone
from lit_encoders.models.layers import find_layers


def stack(count: int) -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(2, 2) for _ in range(count)])


def test_stack_of_a_hugging_face_model(backbone: Backbone) -> None:
    name, layers = find_layers(backbone.model)
    assert name in ("bert.encoder.layer", "model.layers")
    assert layers is backbone.model.get_submodule(name)
    assert len(layers) == backbone.config.num_hidden_layers
    assert find_layers(backbone)[0] == f"model.{name}"


def test_stack_of_a_plain_module() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), num_layers=3, enable_nested_tensor=False)
    assert find_layers(model) == ("layers", model.layers)


def test_experts_inside_blocks_are_no_rivals() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({"experts": stack(8)}) for _ in range(3)])})
    assert find_layers(model)[0] == "blocks"


@pytest.mark.parametrize(("other", "clear"), [(1, True), (2, False), (4, False)])
def test_second_list_of_half_the_length_makes_the_choice_unclear(other: int, clear: bool) -> None:
    model = nn.ModuleDict({"heads": stack(other), "layers": stack(4)})
    if clear:
        assert find_layers(model)[0] == "layers"
        return
    with pytest.raises(ValueError, match=rf"two lists of like size.*\({other}\).*layers_path="):
        find_layers(model)


def test_layers_path_decides() -> None:
    model = nn.ModuleDict({"encoder": stack(4), "decoder": stack(4)})
    assert find_layers(model, "decoder") == ("decoder", model["decoder"])
    with pytest.raises(ValueError, match=r"layers_path must name a list of like blocks \(encoder, decoder\), got 'x'"):
        find_layers(model, "x")


@pytest.mark.parametrize(
    "rest",
    [
        nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2), nn.Linear(2, 2)]),
        nn.ModuleList([nn.Dropout() for _ in range(9)]),
        nn.ModuleList(),
    ],
    ids=["unlike blocks", "no parameters", "empty"],
)
def test_lists_that_are_no_stack(rest: nn.ModuleList) -> None:
    assert find_layers(nn.ModuleDict({"rest": rest, "layers": stack(2)}))[0] == "layers"
    with pytest.raises(ValueError, match="Sequential has no ModuleList of like blocks"):
        find_layers(nn.Sequential(rest))


def test_frozen_stack_is_still_found(bert_folder: Path) -> None:
    from transformers import AutoModelForMaskedLM

    model = AutoModelForMaskedLM.from_pretrained(bert_folder, dtype=torch.float32).requires_grad_(False)
    assert find_layers(model)[0] == "bert.encoder.layer"
