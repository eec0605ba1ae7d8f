"""Run by test_two_processes.py, alone or under two gloo processes: what each rank saw goes into a file of its own."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["OMP_NUM_THREADS"] = "1"

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lit_encoders import LitMLM, TextDataModule
from lit_encoders.callbacks import L2SP, HFExport, LayerFreezing, RunSummary, WeightDrift, WeightReversion

FROZEN = ["0:2", "embeddings"]


def whole(tensor: Tensor | None) -> Tensor | None:
    """A copy, gathered where it is sharded."""
    if tensor is None:
        return None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def weights_of(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: whole(parameter) for name, parameter in module.named_parameters()}


class Steps(Callback):
    """Before all others: gradients as they come, as the optimizer takes them, and what its steps leave behind."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {key: [] for key in ("came", "taken", "weights", "moments", "logged")}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.found["start"] = weights_of(pl_module)
        self.found["trains"] = [name for name, p in pl_module.named_parameters() if p.requires_grad]
        self._step = trainer.global_step

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.found["came"].append({n: whole(p.grad) for n, p in pl_module.named_parameters()})

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        # Clipped, and with what callbacks added; the next backward pass clears them.
        self.found["taken"].append({n: whole(p.grad) for n, p in pl_module.named_parameters()})
        state = trainer.optimizers[0].state
        self.found["weights"].append(weights_of(pl_module))
        self.found["moments"].append(
            {n: whole(state[p]["exp_avg"]) for n, p in pl_module.named_parameters() if "exp_avg" in state.get(p, {})}
        )
        self.found["logged"].append({n: float(v) for n, v in trainer.callback_metrics.items()})


class Shapes(LightningModule):
    """Weights that two processes cannot share out evenly, and a head that is not sharded at all."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(nn.Module() for _ in range(2))
        for layer in self.layers:
            for name, shape in (("cube", (3, 2, 5)), ("single", (1, 4)), ("vector", (5,))):
                layer.register_parameter(name, nn.Parameter(torch.randn(shape, generator=draw, dtype=torch.float64)))
            layer.forward = lambda x, layer=layer: x * sum(p.square().sum() for p in layer.parameters())  # type: ignore[method-assign]
        self.head = nn.Parameter(torch.randn(3, generator=draw, dtype=torch.float64))
        self.sharded = False

    def configure_model(self) -> None:
        if self.device_mesh is not None and not self.sharded:
            for layer in self.layers:
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            self.sharded = True

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        total = batch.double().mean()
        for layer in self.layers:
            total = layer(total)
        return total + self.head.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def on_after_backward(self) -> None:
        if self.sharded:  # Nobody but its author reduces what is not sharded; here every rank has the same.
            assert self.head.grad is not None


def main(folder: str, text: str, output: str, strategy: str) -> None:
    devices = 1 if strategy == "auto" else 2
    root = Path(output) / strategy
    result: dict[str, Any] = {}

    def trainer_of(scenario: str, *callbacks: Callback, accumulate: int = 2 // devices, **settings: Any) -> Trainer:
        sharded = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        return Trainer(
            accelerator="cpu", devices=devices, strategy=sharded if strategy == "fsdp2" else strategy, max_epochs=-1,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            num_sanity_val_steps=0, log_every_n_steps=1, default_root_dir=root / scenario, callbacks=list(callbacks),
            accumulate_grad_batches=accumulate, **settings,
        )  # fmt: skip

    def fit(scenario: str, *callbacks: Callback, ckpt: Path | None = None, **settings: Any) -> tuple[Trainer, Any]:
        module = LitMLM(folder, learning_rate=1e-2, weight_decay=0.1, dtype="float64")
        data = TextDataModule(text, sequence_length=48, slots=96, val_share=0.2)
        steps = Steps()
        trainer = trainer_of(scenario, steps, *callbacks, **settings)
        trainer.fit(module, data, ckpt_path=ckpt)
        result[scenario] = {**steps.found, "end": weights_of(module)}
        return trainer, module

    no_validation: dict[str, Any] = {"limit_val_batches": 0}
    fit("window", LayerFreezing(FROZEN, steps="2:4"), max_steps=6, gradient_clip_val=0.05, **no_validation)
    fit("always", LayerFreezing(FROZEN), max_steps=3, **no_validation)
    fit("decoupled", L2SP({"0:2": 0.5, "rest": 0.1}, mode="decoupled"), max_steps=3, **no_validation)

    def everything() -> list[Callback]:
        return [
            WeightReversion("1:3"), L2SP({"0:2": 0.5, "rest": 0.1}, base=folder), HFExport(),
            LayerFreezing("0:1", steps=":2"), WeightDrift("0:2", every_n_steps=1), RunSummary(),
        ]  # fmt: skip

    two_packs: dict[str, Any] = {"limit_val_batches": 2 // devices}
    fit("all", *everything(), max_steps=4, val_check_interval=8 // devices, **two_packs)
    trainer, _ = fit("half", *everything(), max_steps=1, **two_packs)
    trainer.save_checkpoint(root / "one.ckpt")
    fit("resumed", *everything(), max_steps=4, **two_packs, ckpt=root / "one.ckpt")

    steps = Steps()
    values = DataLoader(torch.ones(8), batch_size=1)
    shapes = trainer_of("shapes", steps, L2SP({"0:1": 0.5, "rest": 0.25}), accumulate=1, max_steps=2)
    shapes.fit(Shapes(), values)
    result["shapes"] = steps.found
    torch.save(result, Path(output) / f"{strategy}-rank{trainer.global_rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:5])
