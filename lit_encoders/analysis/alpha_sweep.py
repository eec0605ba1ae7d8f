"""Which layers carry what training changed: held-out losses on the way from base to trained weights, range by range.

Source: the causal analysis of Ahuja, Blevins (2026), arXiv:2606.00284: theta(alpha) = theta0 + alpha (theta1 - theta0)
in one range, all other ranges stay trained, alpha in {0, .25, .5, .75, 1}.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lit_encoders.data.datamodule import TextDataModule
from lit_encoders.models.layer_range import LayerRange
from lit_encoders.modules.lit_encoder import LitEncoder
from lit_encoders.modules.open_module import open_module
from lit_encoders.plots import curves
from lit_encoders.weights.anchor import read_anchor
from lit_encoders.weights.checkpoint import Weights, open_weights
from lit_encoders.weights.combine import new_folder, weighted_sum
from lit_encoders.weights.numbers import Numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Point:
    """A measurement.

    Attributes:
        layers: the range that is between base and trained weights.
        alpha: where on the way; 0 is the base, 1 the trained weights.
        losses: ``val/<name>/<objective>_loss``, nats per target.
    """

    layers: str
    alpha: float
    losses: dict[str, float]


@torch.no_grad()
def place_between(
    parameters: Mapping[str, nn.Parameter], base: Mapping[str, Tensor], tuned: Mapping[str, Tensor], alpha: float
) -> None:
    """Set parameters to ``base + alpha (tuned - base)``, in float64 with one cast at the end.

    Args:
        parameters: by name, any shape.
        base: the same names, where alpha is 0.
        tuned: the same names, where alpha is 1.
        alpha: the place on the way.
    """
    for name, parameter in parameters.items():
        parameter.copy_(weighted_sum([base[name], tuned[name]], [1.0 - alpha, alpha], parameter.dtype))


def alpha_sweep(
    module: LitEncoder,
    base: Weights,
    ranges: Sequence[str],
    alphas: Sequence[float],
    data: TextDataModule,
    **trainer: Any,
) -> list[Point]:
    """Measure held-out losses for each range and alpha; the module has its trained weights again afterwards.

    Args:
        module: of the trained model.
        base: where its training began.
        ranges: layer ranges, one curve each.
        alphas: places on the way from base (0) to trained weights (1).
        data: whose validation sets are measured.
        **trainer: settings of the Lightning trainer that runs the validations.

    Raises:
        ValueError: a range matches nothing, or the base lacks weights of one.
    """
    settings = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "devices": 1}
    runner = Trainer(**{**settings, "enable_model_summary": False, **trainer})
    module.configure_model()
    names = [name for name, _ in module.named_parameters()]
    chosen = {text: LayerRange(text).parameters(module) for text in ranges}
    starts = {text: read_anchor(parameters, names, base) for text, parameters in chosen.items()}
    whole: dict[str, float] | None = None
    points = []
    for text, parameters in chosen.items():
        tuned = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        for alpha in alphas:
            if alpha != 1 or whole is None:
                place_between(parameters, _beside(starts[text], parameters), _beside(tuned, parameters), alpha)
                losses = _validate(runner, module, data)
            if alpha == 1:
                # The trained model itself, whatever the range.
                losses = whole = whole or losses
            points.append(Point(text, alpha, losses))
        place_between(parameters, tuned, _beside(tuned, parameters), 1.0)
    return points


def _beside(values: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Values on the device that their parameters have gone to."""
    return {name: values[name].to(parameter.device) for name, parameter in parameters.items()}


def _validate(runner: Trainer, module: LitEncoder, data: TextDataModule) -> dict[str, float]:
    runner.validate(module, data, verbose=False)
    metrics = runner.callback_metrics
    return {name: float(value) for name, value in metrics.items() if name.startswith("val/") and name.endswith("loss")}


def alpha_sweep_verb(
    base: str,
    tuned: str,
    layers: str,
    val: dict[str, str],
    output: Path,
    alpha: Numbers | None = None,
    sequence_length: int | None = None,
    slots: int = 4096,
    packs: int | None = None,
) -> str:
    """Measure held-out losses on the way from a base to a trained model, range by range.

    Args:
        base: folder, hub name or checkpoint of the model that training began with.
        tuned: folder or hub name of the trained model.
        layers: ranges, one curve each, such as 0:9,9:28,28:34.
        val: held-out texts by name, such as --val.target=a.txt --val.english=b.txt.
        output: folder to make, for alpha_sweep.csv and alpha_sweep.png.
        alpha: places on the way, 0 the base and 1 the trained model; 0,.25,.5,.75,1 if not given.
        sequence_length: longest piece of a document in tokens; 512, or what the model has positions for, if not given.
        slots: tokens of a pack.
        packs: how many packs of each text are measured; all if not given.
    """
    if output.exists():
        raise ValueError(f"output must be a folder that does not exist yet, got '{output}'")
    alphas = list(ALPHAS) if alpha is None else alpha
    start = open_weights(base, "base")
    ranges = LayerRange(layers).texts
    LayerRange(layers).names(start.layer_map)
    trained = open_weights(tuned, "tuned")
    if trained.architecture.endswith("Model") and not trained.architecture.endswith("LMHeadModel"):
        raise ValueError(
            f"tuned must have an LM head to measure losses with, got a {trained.architecture} in '{tuned}'"
        )
    module = open_module(tuned)
    first = next(iter(val.values()))
    length = sequence_length or min(512, module.max_positions or 512)
    data = TextDataModule(first, val=dict(val), sequence_length=length, slots=max(slots, length))
    limits = {} if packs is None else {"limit_val_batches": packs}
    try:
        points = alpha_sweep(module, start, ranges, alphas, data, **limits)
    except ValueError as error:
        # The first of the texts stands for training data, which are not read.
        named = str(error).replace("data.train", f"val.{next(iter(val))}").replace("data.val.", "val.")
        raise ValueError(named) from error
    with new_folder(output) as folder:
        write_points(folder / "alpha_sweep.csv", points)
        sweep_figure(points, module.objective).savefig(folder / "alpha_sweep.png", dpi=150, bbox_inches="tight")
    return f"{_table(points)}\nWritten: {output / 'alpha_sweep.csv'}, {output / 'alpha_sweep.png'}"


def write_points(path: Path, points: Sequence[Point]) -> None:
    """Write one line per range, alpha and loss."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["layers", "alpha", "loss", "value"])
        for point in points:
            for name, value in point.losses.items():
                table.writerow([point.layers, point.alpha, name.removeprefix("val/"), repr(value)])


def sweep_figure(points: Sequence[Point], objective: str) -> Figure:
    """Draw one panel per validation set and in it one curve per range, of one objective's loss."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for point in points:
        for name, value in point.losses.items():
            if name.endswith(f"{objective}_loss"):
                panel = name.removeprefix("val/").removesuffix(f"/{objective}_loss")
                panels.setdefault(panel, {}).setdefault(point.layers, []).append((point.alpha, value))
    return curves(panels, "alpha (0 base, 1 trained)", f"held-out {objective.upper()} loss (nats)")


def _table(points: Sequence[Point]) -> str:
    names = list(points[0].losses)
    table = Table(title="Held-out losses (nats per target); all other ranges stay trained")
    table.add_column("range")
    for name in ("alpha", *(name.removeprefix("val/").replace("_", " ") for name in names)):
        table.add_column(name, justify="right")
    for before, point in zip([None, *points], points, strict=False):
        label = "" if before is not None and before.layers == point.layers else point.layers
        table.add_row(label, f"{point.alpha:g}", *(f"{point.losses[name]:.4f}" for name in names))
    console = Console(width=max(100, 20 + 18 * len(names)))
    with console.capture() as captured:
        console.print(table)
    return captured.get().rstrip()
