"""Set layer ranges of a trained model back to where they came from. Source: Ahuja, Blevins (2026), arXiv:2606.00284."""

from __future__ import annotations

from pathlib import Path

from lit_encoders.models.layer_range import LayerRange, Part
from lit_encoders.weights.alike import check_alike
from lit_encoders.weights.checkpoint import Weights, open_weights
from lit_encoders.weights.combine import new_folder, write_model
from lit_encoders.weights.export import load_lines


def replace_range(source: Weights, into: Weights, layers: LayerRange, output: Path, operation: str) -> list[str]:
    """Write a model whose layer ranges are another's, byte for byte; all the rest is its own, byte for byte.

    Args:
        source: the model that gives the ranges.
        into: the model that gets them, and gives everything else: tensors, configuration, tokenizer.
        layers: what is taken over.
        output: folder to make.
        operation: its name in ``recipe.json``.

    Returns:
        Names of the tensors taken over.

    Raises:
        ValueError: the output exists, a range matches nothing, or the two models do not fit.
    """
    names = layers.names(into.layer_map)
    (source,) = check_alike(into, [source], names)
    chosen = set(names)
    plan = {name: [(0 if name in chosen else 1, 1.0)] for name in into.tensors}
    recipe = {"operation": operation, "layers": layers.texts, "part": layers.part, "tensors": len(names)}
    with new_folder(output) as folder:
        write_model(folder, into, [source, into], plan, recipe)
    return names


def revert_verb(base: str, tuned: str, layers: str, output: Path, part: Part = "all") -> str:
    """Set layer ranges of a trained model back to the base's weights.

    Args:
        base: folder, hub name or checkpoint of the model that training began with.
        tuned: folder, hub name or checkpoint of the trained model.
        layers: ranges to set back, such as 9:28 or -6:,embeddings.
        output: folder to make; a Hugging Face model with tokenizer and recipe.json.
        part: of the layers, everything, their attention, or their feed-forward.
    """
    chosen = LayerRange(layers, part)
    names = replace_range(open_weights(base, "base"), open_weights(tuned, "tuned"), chosen, output, "revert")
    return f"Set back {chosen}: {len(names)} tensors of '{base}'; all else is '{tuned}'.\n{load_lines(output)}"
