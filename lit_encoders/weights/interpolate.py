"""Walk from base to trained weights: theta(alpha) = theta0 + alpha (theta1 - theta0), in chosen ranges.

Sources: Wortsman et al. (2022), WiSE-FT, arXiv:2109.01903; the alpha sweep of arXiv:2606.00284.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lit_encoders.models.layer_range import LayerRange
from lit_encoders.weights.alike import check_alike
from lit_encoders.weights.checkpoint import Weights, open_weights
from lit_encoders.weights.combine import new_folder, write_model
from lit_encoders.weights.export import load_lines
from lit_encoders.weights.numbers import Numbers


def interpolate(
    base: Weights, tuned: Weights, alphas: Sequence[float], output: Path, layers: LayerRange | None = None
) -> list[Path]:
    """Write models between a base and what was trained from it; alpha 0 is the base and 1 the trained one, exactly.

    Args:
        base: where training began.
        tuned: the trained model; gives everything outside the ranges, configuration and tokenizer.
        alphas: places on the way, beyond [0, 1] too.
        output: folder to make: the model itself for one alpha, ``alpha-0.25/`` and so on in it for several.
        layers: where to interpolate; None everywhere.

    Returns:
        The folders of the models.

    Raises:
        ValueError: no alpha or one twice, the output exists, a range matches nothing, or the models do not fit.
    """
    names = [f"alpha-{alpha:g}" for alpha in alphas]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"alpha must be at least one number, each once, got {list(alphas)}")
    chosen = None if layers is None else set(layers.names(tuned.layer_map))
    (base,) = check_alike(tuned, [base], set(tuned.tensors) if chosen is None else chosen)
    recipe = {"operation": "interpolate", "layers": None if layers is None else layers.texts}
    with new_folder(output) as folder:
        for name, alpha in zip(names, alphas, strict=True):
            place = folder if len(names) == 1 else folder / name
            place.mkdir(exist_ok=True)
            terms = [(index, weight) for index, weight in ((0, 1.0 - alpha), (1, alpha)) if weight != 0]
            plan = {n: terms if chosen is None or n in chosen else [(1, 1.0)] for n in tuned.tensors}
            write_model(place, tuned, [base, tuned], plan, {**recipe, "alpha": alpha})
    return [output] if len(names) == 1 else [output / name for name in names]


def interpolate_verb(base: str, tuned: str, alpha: Numbers, output: Path, layers: str | None = None) -> str:
    """Write models between a base and what was trained from it.

    Args:
        base: folder, hub name or checkpoint of the model that training began with.
        tuned: folder, hub name or checkpoint of the trained model.
        alpha: places on the way, 0 the base and 1 the trained model, such as 0.5 or 0,.25,.5.
        output: folder to make; with several alphas, one in it for each.
        layers: ranges to interpolate, such as 9:28; everything if not given.
    """
    chosen = None if layers is None else LayerRange(layers)
    folders = interpolate(open_weights(base, "base"), open_weights(tuned, "tuned"), alpha, output, chosen)
    return "\n".join(load_lines(folder) for folder in folders)
