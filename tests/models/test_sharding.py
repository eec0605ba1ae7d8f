"""Sharded parameters on one process; tests/callbacks/test_two_processes.py has two."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lit_encoders.models.sharding import fill_state_, gather_state, local, piece_of, reshard, sum_over_pieces, sum_rows


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        torch.distributed.destroy_process_group()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(5, 3)
        self.decoder = nn.Linear(3, 5)
        self.decoder.weight = self.table.weight
        self.register_buffer("count", torch.tensor(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.table(ids))  # type: ignore[no-any-return]


def test_what_is_not_sharded_is_its_own_piece() -> None:
    weight = nn.Parameter(torch.randn(3, 2, dtype=torch.bfloat16))
    assert local(weight) is weight
    assert piece_of(torch.ones(3, 2, dtype=torch.float64), weight).dtype == torch.bfloat16
    assert torch.equal(sum_over_pieces(torch.ones(2), weight), torch.ones(2))
    assert torch.equal(sum_rows(torch.ones(1, 2), [weight]), torch.ones(1, 2))


def test_a_gathered_state_is_the_state_before_sharding(mesh: DeviceMesh) -> None:
    """Whole, in order, and with ties that share their memory, so that they are written once."""
    module = Tied()
    wanted = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    fully_shard(module, mesh=mesh)
    with torch.no_grad():
        module(torch.tensor([1, 2]))  # Leaves gathered weights in the parameters' place.
    state = gather_state(module)
    assert list(state) == list(wanted)
    for name, tensor in state.items():
        assert not isinstance(tensor, DTensor)
        assert torch.equal(tensor, wanted[name])
    assert state["table.weight"].data_ptr() == state["decoder.weight"].data_ptr()


def test_what_is_written_into_a_piece_after_a_validation_counts(mesh: DeviceMesh) -> None:
    module = Tied()
    fully_shard(module, mesh=mesh)
    with torch.no_grad():
        before = module(torch.tensor([1]))
        reshard(module)
        weight = module.table.weight
        assert isinstance(weight, DTensor)
        local(weight).zero_()
        assert torch.equal(module(torch.tensor([1])), module.decoder.bias.expand(1, 5))
    assert not torch.equal(before, module(torch.tensor([1])))


def test_pieces_and_their_sums(mesh: DeviceMesh) -> None:
    module = Tied()
    fully_shard(module, mesh=mesh)
    weight, plain = module.table.weight, nn.Parameter(torch.ones(2))
    whole = torch.arange(15.0).reshape(5, 3)
    assert torch.equal(piece_of(whole, weight), whole)
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert torch.equal(sum_rows(rows, [weight, plain]), rows)
    values = torch.ones(2)
    assert sum_over_pieces(values, weight) is not values, "the caller's own stay as they were"


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, fused=True),
        lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    ],
)
def test_a_state_of_zeros_is_where_an_optimizer_begins(make: Any) -> None:
    torch.manual_seed(0)
    plain = [nn.Parameter(torch.randn(3)) for _ in range(2)]
    filled = copy.deepcopy(plain)
    theirs, ours = make(plain), make(filled)
    fill_state_(ours, filled[:1])
    assert all(torch.equal(a, b) for a, b in zip(plain, filled, strict=True))
    assert ours.state[filled[0]]
    assert not any(value.any() for value in ours.state[filled[0]].values())
    assert filled[1] not in ours.state or not ours.state[filled[1]]
    assert [group["lr"] for group in ours.param_groups] == [0.1]
    for _ in range(3):
        gradient = torch.randn(3)
        for optimizer, weights in ((theirs, plain), (ours, filled)):
            for weight in weights:
                weight.grad = gradient.clone()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(plain, filled, strict=True))
    # What has been stepped is left alone.
    kept = copy.deepcopy(ours.state[filled[0]])
    fill_state_(ours, filled)
    assert all(torch.equal(ours.state[filled[0]][key], value) for key, value in kept.items())


def test_states_that_do_not_begin_at_zero_are_left_alone() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Rprop([weight], lr=0.1)
    fill_state_(optimizer, [weight])
    assert not optimizer.state.get(weight)
