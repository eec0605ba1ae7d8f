"""A plain LightningModule whose gradients a test writes down beforehand, and a recorder of what an optimizer saw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

Weights = dict[str, Tensor]


class Stack(LightningModule):
    """Blocks between a table and a head; a batch of value ``x`` has the gradient ``x * direction`` in every weight."""

    def __init__(self, optimizer: Callable[[Any], Any] | None = None, blocks: int = 3, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Embedding(5, 4)
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(blocks))
            self.head = nn.Linear(4, 5)
        self.optimizer = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=1.0))

    def direction(self, name: str) -> Tensor:
        like = self.get_parameter(name)
        draw = torch.Generator().manual_seed(sum(name.encode()))
        return torch.randn(like.shape, generator=draw, dtype=torch.float64).to(like.dtype)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        trains = [(n, p) for n, p in self.named_parameters() if p.requires_grad]
        return sum(batch.double().mean().to(p.dtype) * (self.direction(n) * p).sum() for n, p in trains)  # type: ignore[return-value]

    def configure_optimizers(self) -> Any:
        return self.optimizer([p for p in self.parameters() if p.requires_grad])


class Seen(Callback):
    """Gradients as the optimizer saw them, unclipped, and the weights after each of its steps."""

    def __init__(self) -> None:
        self.start: Weights = {}
        self.gradients: list[dict[str, Tensor | None]] = []
        self.weights: list[Weights] = []
        self.logged: list[dict[str, float]] = []
        self._step = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.start = {n: p.detach().clone() for n, p in pl_module.named_parameters()}
        self._step = trainer.global_step

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in pl_module.named_parameters()})

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            self.weights.append({n: p.detach().clone() for n, p in pl_module.named_parameters()})
            self.logged.append({n: float(v) for n, v in trainer.callback_metrics.items()})


@pytest.fixture
def stack() -> type[Stack]:
    return Stack


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def run(make_trainer: Callable[..., Trainer]) -> Callable[..., Trainer]:
    """Fit a plain module on micro-batches of the given values, one epoch unless settings say otherwise."""

    def fit(
        module: LightningModule, values: list[float], *callbacks: Callback, ckpt: Any = None, **settings: Any
    ) -> Trainer:
        trainer = make_trainer(**{"max_epochs": 1, "callbacks": list(callbacks), "limit_val_batches": 0, **settings})
        trainer.fit(module, DataLoader(torch.tensor(values), batch_size=1), ckpt_path=ckpt)  # type: ignore[arg-type]
        return trainer

    return fit
