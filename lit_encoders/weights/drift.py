"""How far weights are from where they started: relative distance, cosine, RMS, and whether two models agree.

Source of the measures: Ahuja, Blevins (2026), arXiv:2606.00284.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lit_encoders.models.layer_range import LayerMap, LayerRange, Place
from lit_encoders.plots import heat_map
from lit_encoders.weights.alike import check_alike, listed
from lit_encoders.weights.checkpoint import Weights, open_weights
from lit_encoders.weights.combine import block_workers, new_folder, spans

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Elements taken at once from a live tensor: as many as stay in a cache in float64.
_LIVE_BLOCK = 1 << 18


@dataclass(frozen=True)
class Products:
    """Inner products of a base and of the distances of models from it, summed over weights, in float64.

    Attributes:
        gram: (1 + models, 1 + models); row 0 is the base ``b``, row i the distance ``d_i = w_i - b``.
        numel: number of weights.
    """

    gram: Tensor
    numel: int

    def __add__(self, other: Products) -> Products:
        return Products(self.gram + other.gram, self.numel + other.numel)

    def drift(self, model: int = 1) -> Drift:
        """How far a model is from the base; the first is number 1."""
        base, cross, apart = (float(self.gram[i, j]) for i, j in ((0, 0), (0, model), (model, model)))
        tuned = math.sqrt(max(base + 2 * cross + apart, 0.0))
        norm = math.sqrt(base)
        if norm and tuned:
            # Rounding may leave a cosine of equal weights at 1 + 2e-16.
            cosine = 1.0 if apart == 0 else max(-1.0, min(1.0, (base + cross) / (norm * tuned)))
        else:
            cosine = 1.0 if apart == 0 else 0.0
        relative = math.sqrt(apart) / norm if norm else (0.0 if apart == 0 else math.inf)
        return Drift(relative, cosine, math.sqrt(apart / max(self.numel, 1)))

    def agreement(self, first: int, second: int) -> float:
        """Cosine between the distances (task vectors) of two models; 1 where both are zero, 0 where one is."""
        norms = [math.sqrt(float(self.gram[model, model])) for model in (first, second)]
        if not all(norms):
            return 1.0 if not any(norms) else 0.0
        return max(-1.0, min(1.0, float(self.gram[first, second]) / (norms[0] * norms[1])))


@dataclass(frozen=True)
class Drift:
    """Distance of weights ``w`` from a base ``b``.

    Attributes:
        relative_l2: ``||w - b|| / ||b||``.
        cosine: of ``w`` and ``b``.
        rms: root mean square of ``w - b``, in units of a weight.
    """

    relative_l2: float
    cosine: float
    rms: float


def products(base: Tensor, *models: Tensor) -> Products:
    """Inner products of a base and of the distances from it.

    Args:
        base: any shape; integers have no distance and count as no weights.
        models: of the base's shape.

    >>> products(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])).drift().relative_l2
    0.1
    """
    size = 1 + len(models)
    total, numel = torch.zeros(size, size, dtype=torch.float64), 0
    if base.is_floating_point():
        numel = base.numel()
        flat = [tensor.detach().reshape(-1) for tensor in (base, *models)]
        for start in range(0, numel, _LIVE_BLOCK):
            rows = torch.stack([tensor[start : start + _LIVE_BLOCK].double() for tensor in flat])
            rows[1:] -= rows[:1].clone()
            total += (rows @ rows.T).cpu()
    return Products(total, numel)


def drift(base: Mapping[str, Tensor], tuned: Mapping[str, Tensor]) -> Drift:
    """How far tensors are from a base, over all of them.

    Args:
        base: name -> tensor.
        tuned: the same names -> tensors of the same shapes.

    >>> drift({"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([3.0, 4.0])})
    Drift(relative_l2=0.0, cosine=1.0, rms=0.0)
    """
    return sum_products(products(base[name], tuned[name]) for name in base).drift()


def sum_products(items: Iterable[Products], models: int = 1) -> Products:
    """Add products up; of no items, those of nothing."""
    total = Products(torch.zeros(1 + models, 1 + models, dtype=torch.float64), 0)
    for item in items:
        total = total + item
    return total


def by_place(layer_map: LayerMap, found: Mapping[str, Products], models: int = 1) -> dict[Place, Products]:
    """Sum the products of tensors over each place of a model: its layers and named parts, in order."""
    places = dict.fromkeys(place for name, place in layer_map.places.items() if name in found)
    return {
        place: sum_products(
            (found[name] for name, at in layer_map.places.items() if at == place and name in found), models
        )
        for place in places
    }


def file_products(base: Weights, tuned: Sequence[Weights]) -> dict[str, Products]:
    """Products of models on disk, by tensor; memory does not grow with the models.

    Args:
        base: where the others began.
        tuned: under the base's names.
    """
    names = [name for name in base.layer_map.places if all(name in model.tensors for model in (base, *tuned))]
    found: dict[str, Products] = {}

    def one(name: str) -> Products:
        total = sum_products((), len(tuned))
        for start, stop in spans(base.tensors[name].numel):
            total = total + products(*(model.tensors[name].read(start, stop) for model in (base, *tuned)))
        return total

    with block_workers() as pool:
        for name, result in zip(names, pool.map(one, names), strict=True):
            found[name] = result
    return found


def drift_verb(models: list[str], layers: str | None = None, output: Path | None = None) -> str:
    """Measure how far trained models are from their base, layer by layer.

    Args:
        models: folders, hub names or checkpoints: the base first, then one or more trained from it.
        layers: ranges to sum up besides, such as 0:9,9:28,28:34.
        output: folder to make, for drift.csv and drift.png.
    """
    if len(models) < 2:
        raise ValueError(f"models must be a base and at least one trained from it, got {len(models)}")
    base, *tuned = [open_weights(source, "models") for source in models]
    asked = {text: LayerRange(text).names(base.layer_map) for text in LayerRange(layers or ":").texts}
    shared = [name for name in base.layer_map.places if name in base.tensors]
    held = [set(model.tensors) for model in check_alike(base, tuned, ())]
    compared = set(shared).intersection(*held)
    if not compared:
        raise ValueError(f"models must have tensors in common, got none in {', '.join(models)}")
    tuned = check_alike(base, tuned, compared)
    with nullcontext() if output is None else new_folder(output) as folder:
        found = file_products(base, tuned)
        rows: dict[str, Products] = {
            f"{place}:{place + 1}" if isinstance(place, int) else place: total
            for place, total in by_place(base.layer_map, found, len(tuned)).items()
        }
        for text, names in asked.items() if layers else ():
            rows[text] = sum_products((found[name] for name in names if name in found), len(tuned))
        rows["everything"] = sum_products(found.values(), len(tuned))
        if folder is not None:
            write_csv(folder / "drift.csv", rows, models)
            _picture(rows, models).savefig(folder / "drift.png", dpi=150, bbox_inches="tight")
    lines = [_table(rows, models)]
    apart = [name for name in shared if name not in compared]
    if apart:
        lines.append(f"Left out, since not every model has them: {listed(apart)}")
    if output is not None:
        lines.append(f"Written: {output / 'drift.csv'}, {output / 'drift.png'}")
    return "\n".join(lines)


def _pairs(count: int) -> list[tuple[int, int]]:
    return [(first, second) for first in range(1, count + 1) for second in range(first + 1, count + 1)]


def write_csv(path: Path, rows: Mapping[str, Products], models: Sequence[str]) -> None:
    """Write drifts and agreements, one line per range and model (or pair of models)."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["range", "model", "other", "measure", "value"])
        for label, total in rows.items():
            for number in range(1, len(models)):
                measured = total.drift(number)
                for measure in ("relative_l2", "cosine", "rms"):
                    table.writerow([label, models[number], "", measure, repr(getattr(measured, measure))])
            for first, second in _pairs(len(models) - 1):
                table.writerow(
                    [label, models[first], models[second], "task_vector_cosine", repr(total.agreement(first, second))]
                )


def _table(rows: Mapping[str, Products], models: Sequence[str]) -> str:
    table = Table(title=f"Distance from {models[0]}")
    table.add_column("range")
    numbers = range(1, len(models))
    short = {number: str(number) if len(models) > 2 else "" for number in numbers}
    for number in numbers:
        for measure in ("relative L2", "cosine", "RMS"):
            table.add_column(f"{measure} {short[number]}".strip(), justify="right")
    for first, second in _pairs(len(models) - 1):
        table.add_column(f"cosine {first}~{second}", justify="right")
    for label, total in rows.items():
        measured = [total.drift(number) for number in numbers]
        cells = [text for d in measured for text in (f"{d.relative_l2:.4g}", f"{d.cosine:.6f}", f"{d.rms:.3g}")]
        cells += [f"{total.agreement(first, second):.3f}" for first, second in _pairs(len(models) - 1)]
        table.add_row(label, *cells)
    console = Console(width=max(120, 20 + 14 * len(table.columns)))
    with console.capture() as captured:
        console.print(table)
        for number in numbers:
            if len(models) > 2:
                console.print(f"{number} = {models[number]}", soft_wrap=True, highlight=False)
    return captured.get().rstrip()


def _picture(rows: Mapping[str, Products], models: Sequence[str]) -> Figure:
    values = [[total.drift(number).relative_l2 for total in rows.values()] for number in range(1, len(models))]
    return heat_map(values, models[1:], list(rows), "relative L2 distance from the base")
