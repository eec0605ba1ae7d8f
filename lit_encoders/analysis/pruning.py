"""``lit-encoders prune``: a smaller Hugging Face folder out of a larger one, by what a text makes it use."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lit_encoders.data.datamodule import TextDataModule
from lit_encoders.models.attention import PackLayout
from lit_encoders.models.prune import Sizes, Statistics, check_sizes, prune, watch
from lit_encoders.modules.lit_encoder import LitEncoder
from lit_encoders.modules.open_module import open_module
from lit_encoders.optim.budgets import Tokens
from lit_encoders.weights.checkpoint import open_weights
from lit_encoders.weights.combine import digest_of, new_folder
from lit_encoders.weights.export import load_lines


def parse_layers(text: str | None) -> int | list[int] | None:
    """Read how many layers to keep, or which: "6", or "0,2,4".

    Raises:
        ValueError: neither.

    >>> parse_layers("6"), parse_layers("0,2,4")
    (6, [0, 2, 4])
    """
    if text is None:
        return None
    items = [item.strip() for item in str(text).split(",")]
    if not all(item.isdigit() for item in items):
        raise ValueError(f"layers must be a number of layers, or which ones, such as 6 or 0,2,4, got {text!r}")
    numbers = [int(item) for item in items]
    return numbers[0] if len(numbers) == 1 else numbers


def calibrate(module: LitEncoder, text: str, tokens: float, sequence_length: int | None = None) -> Statistics:
    """Let a model read a text, and gather what its layers, heads, neurons and dimensions do.

    Args:
        module: of the model; its tokenizer reads the text.
        text: as ``data.train`` takes it.
        tokens: how many to read; the whole text where it has no more.
        sequence_length: longest piece of a document; None takes 512, or what the model has positions for.
    """
    module.configure_model()
    assert module.backbone is not None
    length = sequence_length or min(512, module.max_positions or 512)
    source = module.tokenizer_source or str(module.source)
    data = TextDataModule(text, val=text, sequence_length=length, slots=max(2048, length), tokenizer=source)
    try:
        data.prepare_data()
        data.setup("fit")
    except ValueError as error:
        raise ValueError(re.sub(r"\bdata\.(?:train|val)\b", "text", str(error))) from error
    backbone = module.backbone.eval()
    with torch.no_grad(), watch(backbone.model) as statistics:
        for batch in data.val_dataloader()[0]:
            # Padding at the pack's end is no text.
            real = batch.num_tokens
            packing = PackLayout(np.asarray(batch.lengths), causal=module.objective == "clm")
            backbone.encode(batch.input_ids[:real], batch.position_ids[:real], packing)
            if statistics.tokens >= tokens:
                break
    return statistics


def prune_verb(
    model: str,
    output: Path,
    text: str | None = None,
    layers: str | None = None,
    heads: int | None = None,
    mlp: int | None = None,
    hidden: int | None = None,
    tokens: Tokens = 100_000.0,
    dry_run: bool = False,
) -> str:
    """Make a smaller model out of a larger one.

    Args:
        model: folder or hub name of a BERT, RoBERTa, ELECTRA, ModernBERT or UltraBERT model.
        output: folder to make; a Hugging Face model with tokenizer and recipe.json.
        text: calibration text, as data.train takes it; not needed for layers given by number alone.
        layers: how many to keep (those that turn their input most), or which, such as 6 or 0,2,4.
        heads: attention heads to keep in each layer; ultrabert alone.
        mlp: neurons to keep in each feed-forward.
        hidden: hidden size to keep; ultrabert alone.
        tokens: of the calibration text to read.
        dry_run: only print the numbers of parameters before and after.
    """
    sizes = Sizes(parse_layers(layers), heads, mlp, hidden)
    if sizes == Sizes():
        raise ValueError("prune needs at least one of layers, heads, mlp and hidden, got none")
    if output.exists():
        raise ValueError(f"output must be a folder that does not exist yet, got '{output}'")
    module = open_module(model)
    module.configure_model()
    assert module.backbone is not None
    large: Any = module.backbone.model
    check_sizes(large, sizes)
    measured = isinstance(sizes.layers, int) or (heads, mlp, hidden) != (None, None, None)
    if dry_run or not measured:
        statistics = _no_statistics(large)
    elif text is None:
        raise ValueError("text must name a calibration text where a size is measured, got none")
    else:
        statistics = calibrate(module, text, tokens)
    small: Any = prune(large, sizes, statistics)
    before, after = (sum(p.numel() for p in m.parameters()) for m in (large, small))
    line = f"{before:,} parameters before, {after:,} after ({after / before:.1%})"
    if dry_run:
        return line
    recipe = {
        "operation": "prune",
        "layers": sizes.layers,
        "heads": heads,
        "mlp": mlp,
        "hidden": hidden,
        "text": text,
        "tokens": statistics.tokens,
        "block_influence": (statistics.influence / max(statistics.tokens, 1)).tolist(),
        "inputs": [{"source": model, "digest": digest_of(open_weights(model, "model"))}],
        "versions": {name: version(name) for name in ("lit_encoders", "torch", "transformers")},
    }
    with new_folder(output) as folder:
        small.save_pretrained(folder)
        module.tokenizer.save_pretrained(folder)
        (folder / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n", encoding="utf-8")
    return f"{line}\n{load_lines(output)}"


def _no_statistics(model: Any) -> Statistics:
    """Statistics of nothing: every layer, head and neuron alike."""
    with watch(model) as statistics, torch.no_grad():
        model.base_model(torch.zeros(1, 1, dtype=torch.long), packing=PackLayout(np.array([1])))
    return statistics
