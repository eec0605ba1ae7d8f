"""Parameters that FSDP2 spreads over processes: this process's piece, sums over all pieces, and whole tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import SGD, Adam, AdamW, Optimizer


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


def sum_rows(rows: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
    """Add up what each process found on its pieces of several parameters, of which only some may be sharded.

    Args:
        rows: one for each parameter, (parameters, ...).
        parameters: in the same order.
    """
    sharded = [isinstance(parameter, DTensor) for parameter in parameters]
    if not any(sharded):
        return rows
    whole = sum_over_pieces(rows, parameters[sharded.index(True)])
    # Every process has found the whole of the others already.
    mask = torch.tensor(sharded, device=rows.device).reshape(-1, *[1] * (rows.ndim - 1))
    return torch.where(mask, whole, rows)


def fill_state_(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Give parameters that have not been stepped yet the optimizer state from before a first step: zeros.

    A sharded checkpoint loads only if it holds a state for every parameter; one that is frozen from the start has none.
    Optimizers other than SGD and those of Adam's family, whose states may not begin at zero, are left alone.

    Args:
        optimizer: whose other parameters, rates and gradients stay as they are.
        parameters: some of its parameters.
    """
    if not isinstance(optimizer, (Adam, AdamW, SGD)):
        return
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    asked = {id(parameter) for parameter in parameters}
    new = [parameter for parameter in every if id(parameter) in asked and not optimizer.state.get(parameter)]
    if not new:
        return
    waiting, rates = [parameter.grad for parameter in every], [group["lr"] for group in optimizer.param_groups]
    for parameter in every:
        parameter.grad = None
    for parameter in new:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for parameter in new:
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, Tensor):
                value.zero_()  # The step count too: it was no step.
    for parameter, gradient in zip(every, waiting, strict=True):
        parameter.grad = gradient
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


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
