"""Run by test_distributed.py under two gloo processes: what each rank saw goes into a file of its own."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["OMP_NUM_THREADS"] = "1"

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.tensor import DTensor

from lit_encoders import LitMLM, Loss, TextDataModule
from lit_encoders.callbacks import CLMDetour


class Scripted(LitMLM):
    """Rank 0 has one target of gradient 4, rank 1 three of gradient 1 (or none, in the second step)."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.weight = nn.Parameter(torch.ones(1))
        self.gradients: list[float] = []

    def configure_model(self) -> None:
        """No backbone: under DDP each parameter must take part."""

    def training_loss(self, batch: Any) -> Loss:
        script = [[(4.0, 1), (1.0, 3)], [(0.0, 0), (2.0, 2)], [(0.0, 0), (0.0, 0)]]
        gradient, count = script[self.trainer.fit_loop.epoch_loop.batch_idx][self.trainer.global_rank]
        total = (self.weight * gradient * count).sum()
        return Loss(total, count, {"mlm_loss": (total.detach(), count)})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.weight], lr=0.0)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(float("nan") if self.weight.grad is None else self.weight.grad.item())


def full_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Whole tensors, gathered where they are sharded."""
    state = module.state_dict()
    return {name: (x.full_tensor() if isinstance(x, DTensor) else x).clone() for name, x in state.items()}


def moments(trainer: Trainer, module: Any) -> dict[str, torch.Tensor]:
    """First moments of the two heads' transforms."""
    state = trainer.optimizers[0].state
    found = {n: state[p]["exp_avg"] for n, p in module.named_parameters() if "transform.dense" in n and p in state}
    return {name: (x.full_tensor() if isinstance(x, DTensor) else x).clone() for name, x in found.items()}


class Heads(Callback):
    """State of both heads at the ends of the phases, to see that one rests while the other works."""

    def __init__(self) -> None:
        self.seen: dict[int, Any] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step in (3, 13):
            state = {n: x for n, x in full_state(pl_module).items() if "transform.dense" in n}
            self.seen[trainer.global_step] = {"weights": state, "moments": moments(trainer, pl_module)}


def main(folder: str, text: str, output: str, strategy: str) -> None:
    devices = 1 if strategy == "auto" else 2
    settings: dict[str, Any] = {
        "accelerator": "cpu", "devices": devices, "strategy": strategy, "max_epochs": -1,
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "num_sanity_val_steps": 0, "log_every_n_steps": 1, "default_root_dir": output,
    }  # fmt: skip
    data = TextDataModule(text, sequence_length=48, slots=96, val_share=0.2)
    result: dict[str, Any] = {}
    if strategy == "fsdp2":
        settings["strategy"] = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    if strategy == "ddp":
        scripted = Scripted(folder)
        trainer = Trainer(**settings, max_steps=3, limit_val_batches=0)
        trainer.fit(scripted, data)
        result["gradients"] = scripted.gradients
        result["loss"] = float(trainer.callback_metrics["train/mlm_loss"])

    class Packs(LitMLM):
        def training_loss(self, batch: Any) -> Loss:
            self.packs.append(tuple(batch.here))
            targets = self.targets(batch, "mlm", mask_ratio=0.3, seed=self.seed, epoch=batch.here.epoch)
            self.labels.append(targets.labels.tolist())
            return super().training_loss(batch)

    module = Packs(folder, learning_rate=1e-3, clm_head="copy")
    module.packs, module.labels = [], []
    detour = CLMDetour(steps=10, decay_share=0.5, head_warmup_steps=3)
    heads = Heads()
    trainer = Trainer(
        **settings, callbacks=[detour, heads], accumulate_grad_batches=2 // devices, gradient_clip_val=1.0
    )
    trainer.fit(module, data)
    result |= {
        "packs": module.packs,
        "labels": module.labels,
        "tokens": module.tokens,
        "state": full_state(module.backbone),
        "heads": heads.seen,
        "val": {name: float(value) for name, value in trainer.callback_metrics.items() if "loss" in name},
    }
    torch.save(result, Path(output) / f"{strategy}-rank{trainer.global_rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:5])
