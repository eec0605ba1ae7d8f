"""Parameters that FSDP2 spreads over processes: this process's piece, sums over all pieces, and whole tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor


def reshard(module: nn.Module) -> None:
    """Drop the gathered weights that a forward without a backward (validation) leaves in the parameters' place.

    What is written into those is lost, and what is written into the pieces is not seen while they stand there.
    """
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


def local(tensor: Tensor) -> Tensor:
    """This process's piece of a tensor, sharing its memory; a tensor that is not sharded is its own piece."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor  # type: ignore[no-any-return]


def piece_of(whole: Tensor, like: Tensor) -> Tensor:
    """Cut the piece of this process out of a whole tensor, on the device of ``like`` and in its type.

    Args:
        whole: the same on every process.
        like: the parameter whose sharding counts.
    """
    whole = whole.to(device=local(like).device, dtype=like.dtype)
    if isinstance(like, DTensor):
        return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()
    return whole


def sum_over_pieces(values: Tensor, like: Tensor) -> Tensor:
    """Add up what each process found on its pieces.

    Args:
        values: any shape, the same on every process.
        like: a parameter; where it is not sharded, every process has found the whole already.
    """
    if isinstance(like, DTensor):
        values = values.clone()
        torch.distributed.all_reduce(values, group=like.device_mesh.get_group())
    return values


def gather_state(module: nn.Module) -> Mapping[str, Tensor]:
    """The state of a module with whole tensors, on the CPU where they had to be gathered; every process has to ask.

    Tied weights share their memory in the result too.
    """
    reshard(module)
    # By identity, and not by memory: a process may hold no piece at all of a small tensor.
    owners = {name: id(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)}
    whole: dict[int, Tensor] = {}
    state = dict(module.state_dict())
    for name, tensor in state.items():
        if isinstance(tensor, DTensor):
            owner = owners.get(name, id(tensor))
            if owner not in whole:
                whole[owner] = tensor.full_tensor().cpu()
            state[name] = whole[owner]
    return state
