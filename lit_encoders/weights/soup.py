"""Average models that were trained from one start. Source: Wortsman et al. (2022), model soups, arXiv:2203.05482."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from lit_encoders.weights.alike import alike_as_stored, check_alike, listed
from lit_encoders.weights.checkpoint import StoredModel, on_the_model, open_stored
from lit_encoders.weights.combine import new_folder, write_model
from lit_encoders.weights.export import load_lines
from lit_encoders.weights.numbers import Numbers


def soup_weights(count: int, weights: Sequence[float] | None, normalise: bool | None) -> list[float]:
    """The weight of each model in a soup.

    Args:
        count: number of models.
        weights: one for each; None for the uniform mean.
        normalise: divide weights by their sum (True) or take them as they are (False); None asks for a sum of 1, up
            to what rounding leaves of it.

    Raises:
        ValueError: another number of weights, none but zeros, a sum of 0 to divide by, or one that is not 1 unless
            ``normalise`` says what is meant.

    >>> soup_weights(2, None, None), soup_weights(2, [1.0, 3.0], True)
    ([0.5, 0.5], [0.25, 0.75])
    """
    if weights is None:
        return [1.0 / count] * count
    if len(weights) != count:
        raise ValueError(f"weights must be one for each of the {count} models, got {len(weights)}")
    total = math.fsum(weights)
    if normalise is None and not math.isclose(total, 1.0, rel_tol=0, abs_tol=1e-6):
        raise ValueError(f"weights must sum to 1, or --normalise or --no-normalise say what is meant, got {total:g}")
    if not any(weights) or (normalise and total == 0):
        raise ValueError(f"weights must not be all 0, nor sum to 0 where they are normalised, got {list(weights)}")
    return list(weights) if normalise is False else [weight / total for weight in weights]


def soup(
    models: Sequence[StoredModel],
    output: Path,
    weights: Sequence[float] | None = None,
    normalise: bool | None = None,
    base: StoredModel | None = None,
    alpha: float = 1.0,
    strict: bool = True,
) -> tuple[list[str], list[str]]:
    """Write the weighted mean of models, or base + alpha (mean - base); identical models give the model, exactly.

    Args:
        models: of one architecture; the first gives names, configuration and tokenizer.
        output: folder to make.
        weights: one for each model; None for the uniform mean.
        normalise: see `soup_weights`.
        base: where the models' training began; needed for ``alpha`` alone.
        alpha: how far to go from the base to the mean.
        strict: refuse models that differ in their tensors; else what not all hold is the first one's, and is listed.

    Returns:
        Names of tensors that not all models hold: the first one's, which are in the result as they are there, and
        those that the first lacks, which are left out.

    Raises:
        ValueError: the output exists, the models do not fit, or weights and alpha do not make sense.
    """
    if len(models) < (2 if base is None else 1):
        raise ValueError(f"models must be at least two, or one with a base, got {len(models)}")
    if base is None and alpha != 1.0:
        raise ValueError(f"alpha must come with a base to go from, got {alpha:g}")
    if normalise is not None and weights is None:
        raise ValueError("normalise must come with weights to normalise, got none")
    shares = soup_weights(len(models), weights, normalise)
    inputs = [*models, *([] if base is None else [base])]
    held = set(models[0].tensors)
    lacking: list[str] = []
    if not alike_as_stored(inputs):
        first, *others = [on_the_model(model) for model in inputs]
        tuned = check_alike(first, others[: len(models) - 1], None if strict else ())
        held = set(first.tensors).intersection(*(model.tensors for model in tuned))
        lacking = sorted({name for model in tuned for name in model.tensors if name not in first.tensors})
        inputs = [first, *check_alike(first, others, held)]
    template = inputs[0]
    terms = [(number, alpha * share) for number, share in enumerate(shares)]
    if base is not None:
        terms.append((len(models), 1.0 - alpha))
    terms = [(number, weight) for number, weight in terms if weight != 0]
    apart = [name for name in template.tensors if name not in held]
    plan = {name: [(0, 1.0)] if name in set(apart) else terms for name in template.tensors}
    recipe = {"operation": "soup", "weights": shares, "base": None if base is None else base.source, "alpha": alpha}
    with new_folder(output) as folder:
        write_model(folder, template, inputs, plan, {**recipe, "of_the_first_alone": apart, "left_out": lacking})
    return apart, lacking


def soup_verb(
    models: list[str],
    output: Path,
    weights: Numbers | None = None,
    normalise: bool | None = None,
    base: str | None = None,
    alpha: float = 1.0,
    strict: bool = True,
) -> str:
    """Average models: their uniform or weighted mean, or a step from a base toward it.

    Args:
        models: folders, hub names or checkpoints.
        output: folder to make; a Hugging Face model with tokenizer and recipe.json.
        weights: one for each model, such as .5,.3,.2; the uniform mean if not given.
        normalise: divide the weights by their sum, or take a sum other than 1 as it is.
        base: folder, hub name or checkpoint that the models began with.
        alpha: how far to go from the base to the mean; 1 is the mean.
        strict: refuse models that differ in their tensors; false takes what not all hold from the first, and lists it.
    """
    opened = [open_stored(source, "models") for source in models]
    start = None if base is None else open_stored(base, "base")
    apart, lacking = soup(opened, output, weights, normalise, start, alpha, strict)
    lines = [f"Not in every model, taken from the first: {listed(apart)}"] if apart else []
    lines += [f"Not in the first model, left out: {listed(lacking)}"] if lacking else []
    return "\n".join([*lines, load_lines(output)])
