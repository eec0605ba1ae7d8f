"""``Trainer(strategy="fsdp2")``: every process holds a piece of the weights, and reads packs of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies.model_parallel import _load_raw_module_state
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from typing_extensions import override


class FSDP2Strategy(ModelParallelStrategy):
    """Lightning's strategy for FSDP2, with all processes sharding data and no tensor parallelism.

    Left to itself ("auto"), that strategy splits tensors over the devices of a machine, and every one of them would
    read the same packs.

    Args:
        save_distributed_checkpoint: whether each process writes its own pieces, or the first one gathers all.
        settings: further ones of `ModelParallelStrategy`.
    """

    def __init__(self, save_distributed_checkpoint: bool = True, **settings: Any) -> None:
        super().__init__(
            data_parallel_size=1,
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            **settings,
        )

    @override
    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(checkpoint_path))
        if path.is_dir():
            return super().load_checkpoint(path, weights_only)
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

        assert self.model is not None
        assert self.lightning_module is not None
        # The file of a single process. Lightning would take the numbers of its parameters for their places in the
        # module; they are places in the optimizer's groups.
        checkpoint: dict[str, Any] = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
        strict = self.lightning_module.strict_loading
        _load_raw_module_state(checkpoint.pop("state_dict"), self.model, strict=strict)
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        options = StateDictOptions(broadcast_from_rank0=True, full_state_dict=True, strict=strict)
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            groups = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
            set_optimizer_state_dict(self.model, optimizer, optim_state_dict=by_name(state, groups), options=options)
        return checkpoint


def by_name(state: Mapping[str, Any], groups: list[list[str]]) -> dict[str, Any]:
    """Turn an optimizer's state by numbers into one by the names of its parameters.

    Args:
        state: as ``optimizer.state_dict()`` gives it.
        groups: names of the parameters of each of its groups.

    >>> groups = [{"lr": 1, "params": [0]}, {"lr": 2, "params": [1]}]
    >>> by_name({"state": {1: "x"}, "param_groups": groups}, [["b"], ["a"]])
    {'state': {'a': 'x'}, 'param_groups': [{'lr': 1, 'params': ['b']}, {'lr': 2, 'params': ['a']}]}
    """
    numbered = [
        (number, name)
        for g, ns in zip(state["param_groups"], groups, strict=True)
        for number, name in zip(g["params"], ns, strict=True)
    ]
    return {
        "state": {name: state["state"][number] for number, name in numbered if number in state["state"]},
        "param_groups": [
            {**group, "params": names} for group, names in zip(state["param_groups"], groups, strict=True)
        ],
    }


if "fsdp2" not in StrategyRegistry:
    StrategyRegistry.register("fsdp2", FSDP2Strategy, description="FSDP2 over all processes")
