"""What files call weights that the model's own code names otherwise."""

from __future__ import annotations

# The text tower's weights in files of the whole Gemma 3, new and old.
GEMMA3_TEXT_TOWER = {
    r"^model\.language_model\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head": "lm_head",
}
# The two vectors of a norm in files of BERT's time.
OLD_NORMS = {r"LayerNorm\.gamma$": "LayerNorm.weight", r"LayerNorm\.beta$": "LayerNorm.bias"}
