"""Run by test_stream_ranks.py under two gloo processes: streams, heads of their own, a teacher and a probe."""

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
from torch.distributed.tensor import DTensor

from lit_encoders import LitEncoder, LitKD, MaskStream, TextDataModule
from lit_encoders.callbacks import GradientProbe

AGGREGATIONS = ("tokens", "streams", "inputs")
STREAMS = [MaskStream("narrow", 0.1, 0.7, head="narrow"), MaskStream("wide", 0.5, 0.3, weight=0.5, head="wide")]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


class Steps(Callback):
    """Gradients of each optimizer step, and what the added head is after it."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.documents: list[list[float]] = []
        self.mine: list[list[int]] = []
        self.head: list[dict[str, torch.Tensor]] = []
        self.metrics: list[dict[str, float]] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        found = {n: p.grad for n, p in pl_module.named_parameters() if p.grad is not None}
        self.gradients.append({name: whole(gradient) for name, gradient in found.items()})

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        counts = (pl_module.dealer.members(batch) == 1).sum(), len(batch.documents)
        self.mine.append([int(count) for count in counts])
        if trainer.fit_loop._should_accumulate():
            return
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.documents.append([metrics[f"train/{name}/documents"] for name in ("narrow", "wide")])
        self.metrics.append({name: value for name, value in metrics.items() if "gradient/" in name or "loss" in name})
        state = trainer.optimizers[0].state
        found = {}
        for name, parameter in pl_module.named_parameters():
            if ".heads." in name or "predictions" in name:
                found[name] = whole(parameter)
                found |= {f"{name} {key}": whole(x) for key, x in state.get(parameter, {}).items() if x.ndim}
        self.head.append(found)


def fit(module: Any, data: Any, strategy: str, output: str, callbacks: Any = (), ckpt: Any = None, **more: Any) -> Any:
    settings: dict[str, Any] = {
        "accelerator": "cpu", "devices": 1 if strategy == "auto" else 2, "strategy": strategy, "max_epochs": -1,
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "limit_val_batches": 0,
        "enable_model_summary": False, "num_sanity_val_steps": 0, "log_every_n_steps": 1, "default_root_dir": output,
    }  # fmt: skip
    if strategy == "fsdp2":
        settings["strategy"] = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    trainer = Trainer(**{**settings, **more}, callbacks=list(callbacks))
    trainer.fit(module, data, ckpt_path=ckpt)
    return trainer


def state_of(module: Any) -> dict[str, torch.Tensor]:
    return {name: whole(tensor) for name, tensor in module.state_dict().items()}


def main(folder: str, text: str, long: str, output: str, strategy: str) -> None:
    per_step = 2 if strategy == "auto" else 1  # Micro-batches of a rank that make the same step.
    result: dict[str, Any] = {}

    # Five packs in steps of four: the last step has one, and rank 1 none at all.
    def short() -> TextDataModule:
        return TextDataModule(text, sequence_length=48, slots=192, val_share=0.1)

    for aggregation in AGGREGATIONS:
        module = LitEncoder(folder, streams=STREAMS, aggregation=aggregation, learning_rate=1e-3, weight_decay=0.0)
        steps = Steps()
        fit(module, short(), strategy, output, [steps], max_epochs=1, accumulate_grad_batches=2 * per_step)
        result[aggregation] = {
            "gradients": steps.gradients, "metrics": steps.metrics, "mine": steps.mine,
            "records": module.records(), "state": state_of(module),
        }  # fmt: skip

    # One pack a step and rank, some of which are one long document: then a stream has none.
    module = LitEncoder(folder, streams=STREAMS, aggregation="streams", learning_rate=1e-2)
    steps = Steps()
    data = TextDataModule(long, sequence_length=96, slots=96, val_share=0.05)
    fit(module, data, strategy, output, [steps], max_steps=16, accumulate_grad_batches=per_step)
    result["rests"] = {"head": steps.head, "documents": steps.documents, "mine": steps.mine, "state": state_of(module)}

    taught = [MaskStream("narrow", 0.1, 0.7, distill=True, head="narrow"), STREAMS[1]]
    for shard in (False, True) if strategy == "fsdp2" else (False,):
        kd = LitKD(folder, folder, streams=taught, temperature=2.0, shard_teacher=shard, learning_rate=1e-2)
        steps = Steps()
        fit(kd, short(), strategy, output, [steps], max_steps=3, accumulate_grad_batches=per_step)
        result[f"kd{'-sharded' * shard}"] = {"state": state_of(kd), "metrics": steps.metrics}

    if strategy == "fsdp2":
        try:
            GradientProbe().on_train_start(module.trainer, module)
        except NotImplementedError as error:
            result["refused"] = str(error)
    else:
        for probe in ([], [GradientProbe(every_n_steps=2, layers="0:2")]):
            module = LitEncoder(folder, streams=STREAMS, aggregation="streams", learning_rate=1e-2)
            steps = Steps()
            settings = {"max_steps": 4, "accumulate_grad_batches": 2 * per_step, "gradient_clip_val": 1.0}
            trainer = fit(module, short(), strategy, output, [*probe, steps], **settings)
            result["probed" if probe else "unprobed"] = {"state": state_of(module), "metrics": steps.metrics}
        trainer.save_checkpoint(Path(output) / f"{strategy}.ckpt")
        before = module.records()
        again = LitEncoder(folder, streams=STREAMS, aggregation="streams", learning_rate=1e-2)
        settings |= {"max_steps": 6}
        fit(again, short(), strategy, output, [Steps()], Path(output) / f"{strategy}.ckpt", **settings)
        straight = LitEncoder(folder, streams=STREAMS, aggregation="streams", learning_rate=1e-2)
        fit(straight, short(), strategy, output, [Steps()], **settings)
        result["resumed"] = {
            "records": [before, again.records(), straight.records()],
            "states": [state_of(again), state_of(straight)],
        }
    rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0)))
    torch.save(result, Path(output) / f"{strategy}-rank{rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:6])
