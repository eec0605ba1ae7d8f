"""Watch how far weights move from where they started, layer by layer."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from typing_extensions import override

from lit_encoders.callbacks.anchored import START, AnchoredCallback
from lit_encoders.callbacks.periodic import log_now
from lit_encoders.models.layer_range import LayerMap, LayerRange, map_layers
from lit_encoders.models.sharding import local, reshard, sum_over_pieces
from lit_encoders.plots import heat_map
from lit_encoders.weights.drift import Drift, Products, by_place, products, sum_products

MEASURES = ("relative_l2", "cosine", "rms")


def live_products(parameters: Mapping[str, nn.Parameter], anchors: Mapping[str, Tensor]) -> dict[str, Products]:
    """Inner products of live weights with their start, by tensor, over all processes.

    Args:
        parameters: by name.
        anchors: this process's pieces of what they started from, by the same names.
    """
    found = {}
    for name, parameter in parameters.items():
        piece = local(parameter.detach())
        mine = products(anchors[name].to(piece.device), piece)
        gram = sum_over_pieces(mine.gram.to(piece.device), parameter).cpu()
        found[name] = Products(gram, parameter.numel())
    return found


class WeightDrift(AnchoredCallback):
    """Measure the drift from the start: ``||w - w0|| / ||w0||``, cosine and RMS, for each layer, named part and range.

    Logs ``drift/<range>/{relative_l2,cosine,rms}`` for the ranges asked for and for ``everything``. Writes
    ``drift.csv`` (all layers at every measurement) and, at the end, ``drift.png`` into the run folder; with TensorBoard
    the picture, steps against layers, is an image of the log. Works on any LightningModule.

    Args:
        layers: ranges to sum up, such as ["0:9", "9:28", "28:34"].
        every_n_steps: optimizer steps between two measurements, at least 1; the end is always measured.
        base: "start" of the run, or the folder, hub name or checkpoint of the model to measure from.
        device: where the start is kept: "cpu" saves the device's memory; None beside the weights.
        layers_path: dotted name of the list of layers, where it cannot be found.

    Raises:
        ValueError: a range matches nothing, or the base is not the one in the checkpoint.
    """

    def __init__(
        self,
        layers: str | list[str] | None = None,
        every_n_steps: int = 100,
        base: str = START,
        device: str | None = None,
        layers_path: str | None = None,
    ) -> None:
        super().__init__(base, device, layers_path)
        if every_n_steps < 1:
            raise ValueError(f"WeightDrift.every_n_steps must be at least 1, got {every_n_steps}")
        self.ranges = [] if layers is None else LayerRange(layers).texts
        self.every_n_steps = every_n_steps
        # Of each measured step, the drift of each range.
        self.history: dict[int, dict[str, Drift]] = {}
        self._step = 0
        self._layer_map: LayerMap | None = None

    @property
    @override
    def state_key(self) -> str:
        # Not by the base: another one has to be noticed.
        return self._generate_state_key(ranges=self.ranges)

    @override
    def choose(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, nn.Parameter]:
        self._layer_map = map_layers(pl_module, self.layers_path)
        self._names = {text: LayerRange(text).names(self._layer_map) for text in self.ranges}
        return {n: p for n, p in pl_module.named_parameters() if p.is_floating_point()}

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            others = [c for c in trainer.callbacks if isinstance(c, WeightDrift) and c is not self]  # type: ignore[attr-defined]
            if others:  # They would write one over the other's files.
                raise ValueError(
                    "WeightDrift must stand once among the callbacks (several ranges go into its layers), "
                    f"got {1 + len(others)}"
                )
            self.history = {}
        super().setup(trainer, pl_module, stage)

    def measure(self) -> dict[str, Drift]:
        """Drift of each layer, named part and range, as it is now."""
        assert self._layer_map is not None
        found = live_products(self.parameters, self.anchors)
        rows = {
            f"{place}:{place + 1}" if isinstance(place, int) else place: total
            for place, total in by_place(self._layer_map, found).items()
        }
        rows |= {text: sum_products(found[name] for name in names) for text, names in self._names.items()}
        rows["everything"] = sum_products(found.values())
        return {label: total.drift() for label, total in rows.items()}

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._step = trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step > self._step and trainer.global_step % self.every_n_steps == 0:
            self._record(trainer, pl_module)
            now = self.history[trainer.global_step]
            labels = [*self.ranges, "everything"]
            log_now(trainer, pl_module, {f"drift/{t}/{m}": getattr(now[t], m) for t in labels for m in MEASURES})

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if trainer.global_step not in self.history:
            reshard(pl_module)
            self._record(trainer, pl_module)
        if trainer.is_global_zero:
            self.picture().savefig(Path(trainer.default_root_dir) / "drift.png", dpi=150, bbox_inches="tight")

    def _record(self, trainer: Trainer, module: LightningModule) -> None:
        self.history[trainer.global_step] = self.measure()
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        root = Path(trainer.default_root_dir)
        root.mkdir(parents=True, exist_ok=True)
        beside = root / ".drift.csv"
        write_history(beside, self.history)
        os.replace(beside, root / "drift.csv")
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_figure("drift", self.picture(), trainer.global_step)

    def picture(self) -> Any:
        """Heat map of relative distances, steps against layers, as a matplotlib figure."""
        steps = sorted(self.history)
        columns = list(self.history[steps[-1]])
        values = [[self.history[step][label].relative_l2 for label in columns] for step in steps]
        return heat_map(values, [f"step {step}" for step in steps], columns, "relative L2 distance from the start")

    @override
    def state_dict(self) -> dict[str, Any]:
        history = {
            step: {label: [getattr(drift, measure) for measure in MEASURES] for label, drift in rows.items()}
            for step, rows in self.history.items()
        }
        return {**super().state_dict(), "history": history}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.history = {
            step: {label: Drift(*values) for label, values in rows.items()}
            for step, rows in state_dict["history"].items()
        }


def write_history(path: Path, history: Mapping[int, Mapping[str, Drift]]) -> None:
    """Write one line per step, range and measure."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["step", "range", "measure", "value"])
        for step, rows in sorted(history.items()):
            for label, drift in rows.items():
                for measure in MEASURES:
                    table.writerow([step, label, measure, repr(getattr(drift, measure))])
