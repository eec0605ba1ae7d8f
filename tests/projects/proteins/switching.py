"""What the author adds for our schedule: an attribute `objective`, and for our clock an attribute `tokens`."""

import json
from pathlib import Path

import torch
from lightning.pytorch import Callback
from model import PAD, ProteinLM
from torch import Tensor, nn


class SwitchingLM(ProteinLM):
    def __init__(self, num_layers: int = 4, learning_rate: float = 1e-2):
        super().__init__(num_layers, learning_rate)
        self.objective = "mlm"
        self.tokens = 0

    def next_residue_loss(self, residues: Tensor) -> Tensor:
        past = torch.ones(residues.shape[1], residues.shape[1], dtype=torch.bool).tril()
        logits = self(residues, past.expand(len(residues), 1, -1, -1))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), residues[:, 1:].flatten(), ignore_index=PAD)

    def training_step(self, residues: Tensor, batch_idx: int) -> Tensor:
        self.tokens += int((residues != PAD).sum())
        loss = self.masked_loss(residues) if self.objective == "mlm" else self.next_residue_loss(residues)
        self.log(f"{self.objective}_loss", loss)
        return loss

    def configure_optimizers(self):
        return self.make_optimizer()


class Watch(Callback):
    """Objective, learning rates and what the phase has moved, step by step."""

    def __init__(self, path: str | None = None):
        self.path = path
        self.steps: list[dict] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.before = {name: weight.detach().clone() for name, weight in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        moved = [name for name, weight in pl_module.named_parameters() if not torch.equal(weight, self.before[name])]
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        self.steps.append({"objective": pl_module.objective, "rates": rates, "moved": moved})

    def on_fit_end(self, trainer, pl_module) -> None:
        speed = trainer.callback_metrics.get("train/tokens_per_second")
        result = {"steps": self.steps, "tokens": pl_module.tokens, "speed": None if speed is None else float(speed)}
        if self.path is not None:
            Path(self.path).write_text(json.dumps(result))
