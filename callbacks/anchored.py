"""What callbacks share that look back to where the weights started."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from typing_extensions import override

from lit_encoders.models.layer_range import map_layers
from lit_encoders.models.sharding import reshard
from lit_encoders.weights.alike import listed
from lit_encoders.weights.anchor import copies, copy_weights, differing, read_anchor, weight_sums
from lit_encoders.weights.checkpoint import Weights, open_weights
from lit_encoders.weights.combine import digest_of

START = "start"


def _has_layers(module: nn.Module) -> bool:
    """Whether a module holds layers by now, of which ranges can be wrong ones."""
    return any(isinstance(child, nn.ModuleList) and len(child) for child in module.modules())


class AnchoredCallback(Callback):
    """Hold the start of some weights: one copy for all such callbacks, sharded like the weights, verified on a resume.

    The copy is never taken from weights that a checkpoint restored: "start" is what the module is built with, before
    any restore, and has to be what the checkpoint's run began with.

    Args:
        base: "start", or the folder, hub name or checkpoint of a model.
        device: where the copy is kept, such as "cpu"; None beside the weights.
        layers_path: dotted name of the list of layers, where it cannot be found.
    """

    def __init__(self, base: str = START, device: str | None = None, layers_path: str | None = None) -> None:
        super().__init__()
        self.base = base
        self.device = device
        self.layers_path = layers_path
        self.parameters: dict[str, nn.Parameter] = {}
        self.anchors: dict[str, Tensor] = {}
        self._saved: dict[str, Any] | None = None
        self._identity: dict[str, Any] = {}
        self._weights: Weights | None = None

    @property
    def _key(self) -> str:
        return f"{self.base} on {self.device}"

    @abstractmethod
    def choose(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, nn.Parameter]:
        """The parameters whose start is held, by name.

        Raises:
            ValueError: the settings do not fit the module.
        """

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._saved = None  # Of a fit that failed: its teardown is not called.
        # Lightning calls it after this hook, and again to no effect: here the weights are not restored yet.
        call._call_configure_model(trainer)
        if self.base != START:
            self._weights = open_weights(self.base, f"{type(self).__name__}.base")
        self.parameters = {}
        try:
            self._take(trainer, pl_module)
        except ValueError:
            # A module may build its layers in its own setup(), which comes after this one.
            if not is_overridden("setup", pl_module) or _has_layers(pl_module):
                raise

    def _take(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Copy what is not held yet."""
        self.parameters = self.choose(trainer, pl_module)
        held = copies(pl_module, self._key)
        new = {name: parameter for name, parameter in self.parameters.items() if name not in held}
        if self._weights is None:
            held.update(copy_weights(new, self.device))
        else:
            ours, theirs = map_layers(pl_module, self.layers_path).num_layers, self._weights.layer_map.num_layers
            if ours != theirs:  # The same names would be other layers: of a deeper model, say.
                raise ValueError(
                    f"{self._weights.key} must have the model's number of layers, got {theirs} in '{self.base}' for "
                    f"{ours}"
                )
            names = [name for name, _ in pl_module.named_parameters()]
            held.update(read_anchor(new, names, self._weights, self.device))
        self.anchors = held

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        reshard(pl_module)
        resumed = trainer.ckpt_path is not None
        early = set(self.parameters)
        # Again: layers may have been built since, or frozen.
        self._take(trainer, pl_module)
        if resumed and self.base == START and not early.issuperset(self.parameters):
            raise ValueError(
                f"{type(self).__name__}.base must be a folder where a module builds its layers in setup(), which "
                f"comes too late to see where a resumed run began, got {START!r}"
            )
        if self.base == START and not resumed:
            # Something may have changed them since: the run starts here.
            self.anchors.update(copy_weights(self.parameters, self.device))
        elif self.device is None:
            # Set-up came before the module went to its device.
            for name, parameter in self.parameters.items():
                self.anchors[name] = self.anchors[name].to(parameter.device)
        self._identity = self._identify(trainer)
        if self._saved is not None:
            self._verify(self._saved)

    def _identify(self, trainer: Trainer) -> dict[str, Any]:
        if self._weights is None:
            return {"source": START, "sums": weight_sums(self.parameters, self.anchors)}
        digest = digest_of(self._weights) if trainer.is_global_zero else ""
        return {"source": self.base, "digest": trainer.strategy.broadcast(digest)}

    def _verify(self, saved: dict[str, Any]) -> None:
        name, now = f"{type(self).__name__}.base", self._identity
        if ("digest" in saved) != ("digest" in now):
            raise ValueError(f"{name} must be the checkpoint's, {saved['source']!r}, got {now['source']!r}")
        if "digest" in now and saved["digest"] != now["digest"]:
            raise ValueError(
                f"{name} must be the checkpoint's (content {saved['digest'][:12]}), got content {now['digest'][:12]} "
                f"in '{self.base}'"
            )
        if "sums" in now and (other := differing(saved["sums"], now["sums"])):
            raise ValueError(
                f"{name} must be the checkpoint's: this run is built with other weights than that one began with, "
                f"got {listed(other)}; name the folder that it began with"
            )

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"anchor": self._identity}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict["anchor"] or None

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        copies(pl_module, self._key).clear()
        self.parameters, self.anchors, self._saved = {}, {}, None
