"""Move layers of one trained model into another, to see what they carry.

Source: the transplants of Touchent, de la Clergerie (2026), arXiv:2605.12438: a range, all attention, or all MLP
weights, from the detour's model into its twin.
"""

from __future__ import annotations

from pathlib import Path

from lit_encoders.models.layer_range import LayerRange, Part
from lit_encoders.weights.checkpoint import open_weights
from lit_encoders.weights.export import load_lines
from lit_encoders.weights.revert import replace_range


def transplant_verb(donor: str, into: str, output: Path, layers: str = "all", part: Part = "all") -> str:
    """Write a model with layers of another.

    Args:
        donor: folder, hub name or checkpoint of the model that gives the layers.
        into: folder, hub name or checkpoint of the model that gets them and keeps all the rest.
        output: folder to make; a Hugging Face model with tokenizer and recipe.json.
        layers: ranges to move, such as 0:8; every layer if not given.
        part: of the layers, everything, their attention, or their feed-forward.
    """
    chosen = LayerRange(layers, part)
    names = replace_range(open_weights(donor, "from"), open_weights(into, "into"), chosen, output, "transplant")
    return f"Moved {chosen}: {len(names)} tensors of '{donor}'; all else is '{into}'.\n{load_lines(output)}"
