"""Where weights started: copies that are shared, read by name, and recognised again."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lit_encoders import LitMLM
from lit_encoders.weights import anchor
from lit_encoders.weights.anchor import copies, copy_weights, differing, read_anchor, weight_sums
from lit_encoders.weights.checkpoint import open_weights

Tensors = Callable[[Path], dict[str, Tensor]]


def test_copies_are_shared_by_module_and_source_and_die_with_the_module() -> None:
    gc.collect()
    before = len(anchor._COPIES)
    module, other = nn.Linear(1, 1), nn.Linear(1, 1)
    held = copies(module, "start on None")
    held["w"] = torch.ones(1)
    assert copies(module, "start on None") is held
    assert not copies(module, "base on None")
    assert not copies(other, "start on None")
    assert len(anchor._COPIES) == before + 2
    del module, other
    gc.collect()
    assert len(anchor._COPIES) == before


def test_a_copy_does_not_move_with_its_weight() -> None:
    weight = nn.Parameter(torch.ones(2))
    copied = copy_weights({"w": weight}, "cpu")["w"]
    weight.data.zero_()
    assert torch.equal(copied, torch.ones(2))
    assert not copied.requires_grad


@pytest.fixture
def module(base: Path) -> LitMLM:
    module = LitMLM(str(base))
    module.configure_model()
    return module


def test_read_from_a_folder_by_name(base: Path, tuned: Path, module: LitMLM, tensors: Tensors) -> None:
    """Under the module's own names; what is asked for, and nothing else."""
    named = dict(module.named_parameters())
    chosen = {name: p for name, p in named.items() if "layer.1." in name or "word_embeddings" in name}
    found = read_anchor(chosen, list(named), open_weights(str(tuned), "L2SP.base"))
    stored = tensors(tuned)
    assert set(found) == set(chosen)
    for name, tensor in found.items():
        assert torch.equal(tensor, stored[name.removeprefix("backbone.model.")])
        assert not torch.equal(tensor, named[name])


def test_read_in_the_weights_own_type(base: Path, tensors: Tensors) -> None:
    """A model that was built from the folder in bfloat16 is at distance zero from it."""
    module = LitMLM(str(base), dtype="bfloat16")
    module.configure_model()
    named = dict(module.named_parameters())
    for name, tensor in read_anchor(named, list(named), open_weights(str(base), "L2SP.base"), "cpu").items():
        assert torch.equal(tensor, named[name].data)


def test_what_a_folder_lacks_or_has_otherwise(base: Path, module: LitMLM, edited: Callable[..., Path]) -> None:
    named, bias = dict(module.named_parameters()), "bert.encoder.layer.0.output.dense.bias"
    without = open_weights(str(edited(base, {bias: None})), "L2SP.base")
    with pytest.raises(ValueError, match=rf"^L2SP.base must hold what is anchored, '.*' lacks 1 tensor: .*{bias}$"):
        read_anchor(named, list(named), without)
    others = {name: p for name, p in named.items() if not name.endswith(bias)}
    assert len(read_anchor(others, list(named), without)) == len(others)
    wrong = {f"backbone.model.{bias}": nn.Parameter(torch.zeros(3))}
    with pytest.raises(ValueError, match=r"^L2SP.base must be of the model's sizes, got \[32\] for .* of \[3\] in '"):
        read_anchor(wrong, list(named), open_weights(str(base), "L2SP.base"))


def test_sums_against_numpy() -> None:
    torch.manual_seed(0)
    weights = {"a": nn.Parameter(torch.randn(300, 70)), "b": nn.Parameter(torch.randn(5).bfloat16())}
    found = weight_sums(weights, {name: w.detach() for name, w in weights.items()})
    for name, weight in weights.items():
        exact = weight.detach().double().numpy()
        assert found[name] == pytest.approx([exact.sum(), np.square(exact).sum()], rel=1e-12)
    assert weight_sums({}, {}) == {}


def test_a_start_is_recognised_whatever_the_order_of_adding_up() -> None:
    torch.manual_seed(0)
    values = torch.randn(100_000)
    first, second = values.double().sum().item(), values.double().flip(0).cumsum(0)[-1].item()
    squares = values.double().square().sum().item()
    assert not differing({"w": [first, squares]}, {"w": [second, squares]})
    # One weight of a hundred thousand, moved by a thousandth.
    values[7] += 1e-3
    moved = [values.double().sum().item(), values.double().square().sum().item()]
    assert differing({"w": [first, squares]}, {"w": moved}) == ["w"]
    assert not differing({}, {"w": moved}), "nothing is known of a weight that was not held then"
