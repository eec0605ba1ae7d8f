"""Run by test_numerics_guard.py under two gloo processes: what each rank saw goes into a file of its own."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["OMP_NUM_THREADS"] = "1"

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor

from lit_encoders import LitMLM, TextDataModule
from lit_encoders.callbacks import NumericsGuard, numerics_guard
from lit_encoders.models.sharding import local
from lit_encoders.modules.token_mean import Loss

STRATEGIES = ["ddp", "fsdp2"]
# What is planted in step 2, on rank 1 alone: a loss that is not finite, or that spoils no gradient; a gradient.
CASES = ["healthy", "healthy-without", "nan", "inf", "gradient", "deferred", "deferred-healthy"]
# Its piece of this one is not empty on rank 1.
SPOILED = "backbone.model.bert.encoder.layer.1.output.dense.weight"


def state_of(trainer: Trainer, module: LightningModule) -> dict[str, Tensor]:
    """This rank's pieces of weights and moments."""
    found = {name: local(parameter).detach().clone() for name, parameter in module.named_parameters()}
    for name, parameter in module.named_parameters():
        for key, value in trainer.optimizers[0].state.get(parameter, {}).items():
            found[f"{name}/{key}"] = local(value).clone()
    return found


class Planted(LitMLM):
    """Loss of the second micro-batch of step 2, on rank 1."""

    planted: float | None = None

    def training_loss(self, batch: Any) -> Loss:
        loss = super().training_loss(batch)
        if self.planted is None or (self.global_rank, self.trainer.global_step, self._micro) != (1, 1, 1):
            return loss
        # inf is added: gradients stay finite.
        return replace(
            loss, total=loss.total * self.planted if self.planted != float("inf") else loss.total + torch.inf
        )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._micro = batch_idx % 2


class Watch(Callback):
    """Batches of each micro-batch, and the state before the step at hand; spoils a gradient where asked."""

    def __init__(self, spoil: bool) -> None:
        self.spoil = spoil
        self.documents: list[list[int]] = []
        self.before: list[dict[str, Tensor]] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.documents.append(batch.documents.tolist())
        if batch_idx % 2 == 0:
            self.before.append(state_of(trainer, pl_module))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if self.spoil and trainer.global_step == 1 and trainer.global_rank == 1:
            gradient = pl_module.get_parameter(SPOILED).grad
            assert gradient is not None
            local(gradient).view(-1)[3] = float("nan")


def main(folder: str, text: str, output: str) -> None:
    result: dict[str, Any] = {}
    for strategy in STRATEGIES:
        for case in CASES:
            numerics_guard.DEFERRED = ("cpu",) if case.startswith("deferred") else ()  # type: ignore[attr-defined]
            sharded = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
            watch = Watch(spoil=case == "gradient")
            guards = [] if case == "healthy-without" else [NumericsGuard()]
            root = Path(output) / strategy / case
            trainer = Trainer(
                accelerator="cpu", devices=2, strategy=sharded if strategy == "fsdp2" else strategy, max_epochs=-1,
                max_steps=3, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                enable_model_summary=False, num_sanity_val_steps=0, limit_val_batches=0, log_every_n_steps=1,
                default_root_dir=root, callbacks=[*guards, watch], accumulate_grad_batches=2, gradient_clip_val=1.0,
            )  # fmt: skip
            module = Planted(folder, learning_rate=1e-2)
            module.planted = {"nan": float("nan"), "deferred": float("nan"), "inf": float("inf")}.get(case)
            message = None
            try:
                trainer.fit(module, TextDataModule(text, sequence_length=48, slots=96, val_share=0.2))
            except numerics_guard.RunStoppedError as error:
                message = str(error)
            result[f"{strategy}/{case}"] = {
                "message": message,
                "documents": watch.documents,
                "before": watch.before[-1],
                "steps": len(watch.before),
                "after": state_of(trainer, module),
                "found_inf": hasattr(trainer.optimizers[0], "found_inf"),
            }
    torch.save(result, Path(output) / f"rank{trainer.global_rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:4])
