"""``lit-encoders cka A B``: where two models see texts differently, beside what seeds alone do."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path

from lit_encoders.analysis.cka import FORMS, LEAST_TEXTS, LayerDistance, cka_of_layers, known, layer_distances
from lit_encoders.evaluation.embeddings import embed_layers
from lit_encoders.evaluation.tables import markdown
from lit_encoders.evaluation.texts import first_texts, texts_digest
from lit_encoders.modules.open_module import open_module
from lit_encoders.plots import heat_map
from lit_encoders.weights.combine import new_folder


def cka_verb(
    one: str,
    other: str,
    text: str,
    output: Path,
    control: str | None = None,
    texts: int = 500,
    sequence_length: int | None = None,
    slots: int = 4096,
) -> str:
    """Compare how two models see the same texts: linear CKA of the means over each text's tokens, in float64.

    Args:
        one: folder or hub name of a model.
        other: of another one.
        text: file of texts, as data.train takes it.
        output: folder to make, for cka.csv, cka.json and cka.png.
        control: model that differs from the second in its seed alone; what is farther than that is no chance.
        texts: number of texts, from the first; at least 4.
        sequence_length: longest text in tokens, the rest is cut off; 512, or what the models have positions for, if not
            given.
        slots: tokens that are read at once.

    Raises:
        ValueError: there are fewer texts, a model cannot be read, a number is out of its range, or the models' depths
            differ beside a control.
    """
    if output.exists():
        raise ValueError(f"output must be a folder that does not exist yet, got '{output}'")
    if texts < LEAST_TEXTS:
        raise ValueError(f"texts must be at least {LEAST_TEXTS}, got {texts}")
    read = first_texts(text, texts, "text", asked_by="texts")
    modules = [open_module(source, on_gpu=True) for source in (one, other, *([control] if control else []))]
    limits = [module.max_positions for module in modules if module.max_positions is not None]
    length = min([512, *limits]) if sequence_length is None else sequence_length
    slots = max(slots, length)
    features = [embed_layers(module, read, sequence_length=length, slots=slots, causal=False) for module in modules]
    depths = [len(layers) for layers in features]
    alike = depths[0] == depths[1]
    if control and len(set(depths)) > 1:
        raise ValueError(f"control must have models of one depth, got {depths} layers")
    pairs = {name: cka_of_layers(features[0], features[1], form) for name, form in FORMS.items()}
    distances = layer_distances(features[0], features[1], features[2] if control else None) if alike else []
    facts = {"one": one, "other": other, "control": control, "text": text, "texts": texts, "sequence_length": length}
    with new_folder(output) as folder:
        (folder / "cka.csv").write_text(as_csv(distances), encoding="utf-8")
        every = {name: [[known(value) for value in row] for row in matrix.tolist()] for name, matrix in pairs.items()}
        whole = {**facts, "texts_digest": texts_digest(read), "layer_pairs": every}
        (folder / "cka.json").write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
        rows, columns = (
            [f"{name} {layer}" for layer in range(depth)] for name, depth in zip("AB", depths, strict=False)
        )
        title = "CKA of all pairs of layers (debiased, standardised)"
        picture = heat_map(pairs["debiased, standardised"].tolist(), rows, columns, title)
        picture.savefig(folder / "cka.png", dpi=150, bbox_inches="tight")
    table = distance_table(distances) if alike else "The models' depths differ: the picture has all pairs of layers."
    return f"{table}\nWritten: {output / 'cka.csv'}, {output / 'cka.json'}, {output / 'cka.png'}"


def distance_table(distances: Sequence[LayerDistance]) -> str:
    """Distances 1 - CKA as a table, a line for each layer; with a control how many times farther than it."""
    layers = sorted({item.layer for item in distances})
    by_place = {(item.layer, item.form): item for item in distances}
    rows = []
    for layer in layers:
        cells = []
        for form in FORMS:
            item = by_place[layer, form]
            # One that is 0 but for rounding may be below it.
            distance = "-" if known(item.distance) is None else f"{item.distance:z.4f}"
            cells.append(distance if known(item.ratio) is None else f"{distance} ({item.ratio:z.1f}x)")
        rows.append([str(layer), *cells])
    controlled = any(item.control is not None for item in distances)
    title = "Distance 1 - CKA" + ("; in brackets, how many times that of the seed control" if controlled else "")
    return f"{title}\n\n{markdown(['layer', *FORMS], rows)}\n"


def as_csv(distances: Sequence[LayerDistance]) -> str:
    """A line for each layer and form."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["layer", "form", "distance", "control", "ratio"])
    for item in distances:
        values = [known(value) for value in (item.distance, item.control, item.ratio)]
        lines.writerow([item.layer, item.form, *("" if value is None else repr(value) for value in values)])
    return text.getvalue()
