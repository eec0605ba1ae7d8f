"""How far each weight has moved since the start of training."""

import json
from pathlib import Path

from lightning.pytorch import Callback


class WeightDistance(Callback):
    def __init__(self, path: str):
        self.path = path

    def on_train_start(self, trainer, pl_module) -> None:
        self.start = {name: weight.detach().clone() for name, weight in pl_module.named_parameters()}

    def on_train_end(self, trainer, pl_module) -> None:
        distance = {
            name: (p.detach() - self.start[name]).abs().max().item() for name, p in pl_module.named_parameters()
        }
        Path(self.path).write_text(json.dumps(distance))
