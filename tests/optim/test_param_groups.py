"""Vectors never decay, whatever a model calls its norms."""

from typing import Any

import pytest
import torch
from torch import nn

from lit_encoders.optim.param_groups import apply_scales, parameter_groups

SHARED = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def masked_lm(model_type: str, **settings: Any) -> nn.Module:
    from transformers import AutoConfig, AutoModelForMaskedLM

    config = AutoConfig.for_model(model_type, **SHARED, vocab_size=40, pad_token_id=0, **settings)
    return AutoModelForMaskedLM.from_config(config)


@pytest.fixture(params=["bert", "modernbert", "roberta"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    ends = {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
    extra = {"modernbert": {**ends, "norm_bias": True}}
    return masked_lm(request.param, **extra.get(request.param, {}))


def test_f11_no_decay_set_is_every_vector(model: nn.Module) -> None:
    decaying, resting = parameter_groups(model, 0.1)
    assert (decaying["weight_decay"], resting["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    vectors = {name for name, parameter in model.named_parameters() if len(parameter.shape) == 1}
    assert {names[id(parameter)] for parameter in resting["params"]} == vectors
    # By the names these three models give them: nothing but norms and biases.
    assert all(name.endswith("bias") or "norm" in name.lower() for name in vectors)
    assert any("norm" in name.lower() and name.endswith("weight") for name in vectors)


def test_f11_each_trainable_parameter_is_in_exactly_one_group(model: nn.Module) -> None:
    grouped = [id(parameter) for group in parameter_groups(model, 0.1) for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())


def test_f08_tied_embedding_is_counted_once_and_the_optimizer_takes_the_groups(model: nn.Module) -> None:
    tied = model.get_output_embeddings().weight
    assert tied is model.get_input_embeddings().weight
    groups = parameter_groups(model, 0.1)
    assert [sum(parameter is tied for parameter in group["params"]) for group in groups] == [1, 0]
    torch.optim.AdamW(groups, lr=1e-3)  # Raises where a parameter appears in more than one group.


def test_frozen_parameters_are_in_no_group(model: nn.Module) -> None:
    model.get_input_embeddings().requires_grad_(False)
    frozen = {id(parameter) for parameter in model.parameters() if not parameter.requires_grad}
    grouped = {id(parameter) for group in parameter_groups(model, 0.1) for parameter in group["params"]}
    assert frozen
    assert not frozen & grouped
    assert len(frozen | grouped) == len(list(model.parameters()))


def test_empty_groups_are_left_out() -> None:
    assert parameter_groups(nn.LayerNorm(4), 0.1)[0]["weight_decay"] == 0.0
    assert [group["weight_decay"] for group in parameter_groups(nn.Embedding(4, 2), 0.1)] == [0.1]
    assert parameter_groups(nn.Linear(2, 2).requires_grad_(False), 0.1) == []


def test_one_step_without_gradients_shrinks_matrices_alone() -> None:
    """The closed form of decoupled decay: w (1 - lr x decay) for a zero gradient."""
    layer = nn.Linear(3, 3)
    before = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    optimizer = torch.optim.AdamW(parameter_groups(layer, 0.5), lr=0.1)
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), before["weight"] * 0.95)
    assert torch.equal(layer.bias.detach(), before["bias"])


def test_ranges_that_do_not_decay(model: nn.Module) -> None:
    from lit_encoders.models.layer_range import LayerRange

    groups = parameter_groups(model, 0.1, no_decay=["0:1", "embeddings"])
    resting = {id(parameter) for group in groups if group["weight_decay"] == 0 for parameter in group["params"]}
    exempt = {id(parameter) for parameter in LayerRange(["0:1", "embeddings"]).parameters(model).values()}
    vectors = {id(parameter) for parameter in model.parameters() if parameter.ndim == 1}
    assert resting == exempt | vectors


def test_layer_decay_by_closed_form(model: nn.Module) -> None:
    """Two layers at 0.5: embeddings 1/4, layer 0 1/2, layer 1 and the head 1; every optimizer takes it."""
    groups = parameter_groups(model, 0.1, layer_decay=0.5)
    optimizer = torch.optim.SGD(groups, lr=8.0)
    apply_scales(optimizer.param_groups)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        expected = 2.0 if "embeddings" in name else 4.0 if ".0." in name else 8.0
        assert rates[id(parameter)] == expected, name
    assert len(rates) == len(list(model.parameters()))
