"""After training, write a second model whose layer ranges are back where they started.

Source: "dense-reverted" and "expert-reverted" of Ahuja, Blevins (2026), arXiv:2606.00284.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from typing_extensions import override

from lit_encoders.callbacks.anchored import START, AnchoredCallback
from lit_encoders.callbacks.hf_export import HFExport, write_export
from lit_encoders.callbacks.weight_drift import live_products
from lit_encoders.models.layer_range import LayerRange, Part, map_layers
from lit_encoders.models.sharding import local, reshard
from lit_encoders.weights.drift import Drift, sum_products
from lit_encoders.weights.export import ExportDtype


@contextmanager
def reverted(module: nn.Module, parameters: Mapping[str, nn.Parameter], start: Mapping[str, Tensor]) -> Iterator[None]:
    """Put the start of some weights in their place for a while; afterwards the trained ones are back, bit for bit.

    Args:
        module: that holds the parameters.
        parameters: by name.
        start: this process's pieces of what they started from, by the same names.
    """
    reshard(module)
    trained = {name: local(parameter.detach()).clone() for name, parameter in parameters.items()}
    try:
        _put(module, parameters, start)
        yield
    finally:
        _put(module, parameters, trained)


@torch.no_grad()
def _put(module: nn.Module, parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    reshard(module)
    for name, parameter in parameters.items():
        local(parameter).copy_(values[name])


class WeightReversion(AnchoredCallback):
    """Write ``export-reverted/`` beside the export: the trained model with layer ranges set back to their start.

    It acts when the last step and the last validation are over. The run itself goes on as if it were not there: the
    weights are put back, so the last checkpoint and every export hold the trained ones, wherever this callback stands
    among the others. A `LitEncoder` gives a Hugging Face folder, and the held-out losses of both models; so does any
    module that holds one Hugging Face model, without losses; of another the state is written as safetensors.

    Its ``report`` holds each range's drift from the start, before and after, and the losses; `RunSummary` prints it and
    writes it into ``summary.json``.

    Args:
        layers: what is set back: "9:28" (0-based, half-open), "all", a named part, or several.
        base: "start" of the run, or the folder, hub name or checkpoint of the model to go back to.
        part: of the layers, everything, their attention, or their feed-forward.
        device: where the start is kept: "cpu" saves the device's memory; None beside the weights.
        layers_path: dotted name of the list of layers, where it cannot be found.

    Raises:
        ValueError: a range matches nothing, or the base is not the one in the checkpoint.
    """

    def __init__(
        self,
        layers: str | list[str],
        base: str = START,
        part: Part = "all",
        device: str | None = None,
        layers_path: str | None = None,
    ) -> None:
        super().__init__(base, device, layers_path)
        self.layers = LayerRange(layers, part)
        self.report: dict[str, Any] | None = None
        self.folder: Path | None = None

    @property
    @override
    def state_key(self) -> str:
        # Not by the base: another one has to be noticed.
        return self._generate_state_key(layers=str(self.layers))

    @override
    def choose(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, nn.Parameter]:
        layer_map, named = map_layers(pl_module, self.layers_path), dict(pl_module.named_parameters())
        self._names = {text: LayerRange(text, self.layers.part).names(layer_map) for text in self.layers.texts}
        return {name: named[name] for name in self.layers.names(layer_map)}

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        others = [c for c in trainer.callbacks if isinstance(c, WeightReversion) and c is not self]  # type: ignore[attr-defined]
        if others:
            raise ValueError(
                "WeightReversion must stand once among the callbacks (several ranges go into its layers), "
                f"got {1 + len(others)}"
            )

    def _drifts(self) -> dict[str, Drift]:
        """How far each range is from the start, as it is now."""
        found = live_products(self.parameters, self.anchors)
        return {text: sum_products(found[n] for n in names).drift() for text, names in self._names.items()}

    def _dtype(self, trainer: Trainer) -> ExportDtype | None:
        """The type that the run's own export is stored in, so that the two folders compare."""
        exports = [c for c in trainer.callbacks if isinstance(c, HFExport) and c.at_end]  # type: ignore[attr-defined]
        return exports[0].dtype if exports else None

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        folder = Path(trainer.default_root_dir) / "export-reverted"
        reshard(pl_module)
        before, trained = self._drifts(), held_out_losses(trainer, pl_module)
        with reverted(pl_module, self.parameters, self.anchors):
            after, losses = self._drifts(), held_out_losses(trainer, pl_module)
            line = f"- Set back to {self.base!r}: layers {self.layers}\n"
            self.folder = write_export(trainer, pl_module, folder, losses, line, self._dtype(trainer))
        drifts = {t: {"before": asdict(before[t]), "after": asdict(after[t])} for t in before}
        self.report = {
            "layers": str(self.layers),
            "base": self.base,
            "drift": drifts,
            "losses": {name: {"trained": trained[name], "reverted": losses[name]} for name in losses},
            "export": str(self.folder),
        }


def held_out_losses(trainer: Trainer, module: Any) -> dict[str, float]:
    """Losses of a module on the trainer's validation sets, as it stands; none where it cannot measure them.

    Args:
        trainer: whose data and limits count.
        module: with a method `LitEncoder.held_out_losses`.
    """
    data = getattr(trainer, "datamodule", None)
    if not hasattr(module, "held_out_losses") or data is None or not trainer.enable_validation:
        return {}
    # A run that never came to a validation has no limits yet.
    limits = trainer.num_val_batches or [float("inf")] * len(data.val_names)
    loaders = zip(data.val_names, data.val_dataloader(), limits, strict=True)
    limited = {name: loader if limit == float("inf") else islice(loader, int(limit)) for name, loader, limit in loaders}
    return module.held_out_losses(limited)  # type: ignore[no-any-return]
