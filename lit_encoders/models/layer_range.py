"""Layer ranges: which parameters of a model a user means by "0:8", "-6:", "all", "embeddings" or "head"."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn

from lit_encoders.models.layers import find_layers

Part = Literal["all", "attention", "mlp"]
NamedPart = Literal["embeddings", "final_norm", "head"]
Place = int | NamedPart

_SLICE = re.compile(r"^(-?\d+)?:(-?\d+)?$")
_NORM = re.compile(r"norm|^ln")
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_MLP = re.compile(r"mlp|ffn|feed_?forward|intermediate|^output$|^linear\d|^fc\d|dense", re.IGNORECASE)


def parse_range(text: str) -> slice:
    """Read a half-open, 0-based range as Python reads a slice.

    Raises:
        TypeError: an integer: YAML read an unquoted ``9:28`` as a number in base 60.
        ValueError: not a range.

    >>> parse_range("9:28"), parse_range("-6:")
    (slice(9, 28, None), slice(-6, None, None))
    """
    if not isinstance(text, str):
        raise TypeError(f'layers must be text in quotes, such as "9:28" (YAML reads 9:28 as a number), got {text}')
    found = _SLICE.match(text)
    if not found:
        named = ", ".join(repr(name) for name in ("all", *get_args(NamedPart)))
        raise ValueError(f"layers must be like '0:8' or '-6:', or one of {named}, got {text!r}")
    start, stop = (None if bound is None else int(bound) for bound in found.groups())
    return slice(start, stop)


@dataclass(frozen=True)
class LayerMap:
    """Where each parameter of a model stands.

    Attributes:
        path: dotted name of the list of layers.
        num_layers: its length.
        places: of each parameter, by name and a tied one once, the number of its layer or a named part.
        parts: of each parameter in a layer, "attention", "mlp", or "" for what stands beside both (norms).
        ties: further names of tied parameters, each with the name that it is listed under.
    """

    path: str
    num_layers: int
    places: dict[str, Place]
    parts: dict[str, str]
    ties: dict[str, str]


def map_layers(module: nn.Module, layers_path: str | None = None) -> LayerMap:
    """Find out where each parameter of a module stands.

    Every parameter stands in one place: in a layer; in the ``embeddings`` (the tables outside the layers, what stands
    beside them in a module of their own, and projections named after them); in the ``final_norm`` (norms beside the
    list of layers); or in the ``head`` (all the rest). A decoder tied to the embeddings stands with the embeddings.

    Args:
        module: a Hugging Face model, a LightningModule, or any other.
        layers_path: dotted name of the list of layers, where it cannot be found.

    Raises:
        ValueError: there is no list of layers, or two of like size.

    >>> model = nn.ModuleDict({"embed": nn.Embedding(2, 2), "blocks": nn.ModuleList([nn.Linear(2, 2)])})
    >>> map_layers(model).places
    {'embed.weight': 'embeddings', 'blocks.0.weight': 0, 'blocks.0.bias': 0}
    """
    path, layers = find_layers(module, layers_path)
    embeddings = _embeddings(module, path)
    beside = path.rpartition(".")[0]
    listed: dict[int, str] = {}
    places: dict[str, Place] = {}
    parts: dict[str, str] = {}
    ties: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in listed:
            ties[name] = listed[id(parameter)]
            continue
        listed[id(parameter)] = name
        if name.startswith(f"{path}."):
            number, _, inside = name.removeprefix(f"{path}.").partition(".")
            places[name], parts[name] = int(number), _part(inside)
        elif id(parameter) in embeddings:
            places[name] = "embeddings"
        else:
            owner = name.rpartition(".")[0]
            parent, _, leaf = owner.rpartition(".")
            places[name] = "final_norm" if parent == beside and owner and _NORM.search(leaf.lower()) else "head"
    return LayerMap(path, len(layers), places, parts, ties)


def _part(inside: str) -> str:
    """Attention or feed-forward, from a parameter's name inside its layer."""
    for component in inside.split(".")[:-1]:
        if _NORM.search(component.lower()):
            return ""
        if _ATTENTION.search(component):
            return "attention"
        if _MLP.search(component):
            return "mlp"
    return ""


def _embeddings(module: nn.Module, path: str) -> set[int]:
    """Identities of the parameters of the embeddings; by identity, since a tied table has other names too."""
    modules = {name: child for name, child in module.named_modules() if not name.startswith(f"{path}.")}
    tables = [name for name, child in modules.items() if isinstance(child, nn.Embedding)]
    above = ["", *(path[: match.start()] for match in re.finditer(r"\.", path))]
    # The encoder: the innermost module that holds both the layers and a table.
    encoder = max((a for a in above if any(t.startswith(f"{a}.") for t in tables)), key=len, default="")
    wanted: set[int] = set()
    for name in tables:
        parent = name.rpartition(".")[0]
        # Where the tables stand right beside the layers, their parent is the whole model.
        wanted |= {id(parameter) for parameter in modules[name if parent in above else parent].parameters()}
    inside = f"{encoder}." if encoder else ""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name.startswith(inside) and not name.startswith(f"{path}."):
            components = name.removeprefix(inside).split(".")
            if any("embed" in c and ".".join([*inside.split(".")[:-1], c]) not in above for c in components):
                wanted.add(id(parameter))
    return wanted


class LayerRange:
    """A choice of layers and named parts, found in any Hugging Face model or LightningModule.

    Args:
        layers: "a:b" (0-based, half-open, negative from the end), "all" (every layer), "embeddings", "final_norm" or
            "head"; several as a list, or in one text with commas.
        part: of the layers, everything, their attention, or their feed-forward: by the modules of those names, so norms
            between the two (ModernBERT's) are in neither, and norms inside one (BERT's) belong to it.

    Raises:
        TypeError: a number, as YAML makes of an unquoted range.
        ValueError: not a range, or a part that is not known.

    >>> model = nn.ModuleDict({"embed": nn.Embedding(2, 2), "blocks": nn.ModuleList([nn.Linear(2, 2)] * 1)})
    >>> list(LayerRange("0:1").parameters(model)), str(LayerRange(["0:1", "embeddings"]))
    (['blocks.0.weight', 'blocks.0.bias'], '0:1, embeddings')
    """

    def __init__(self, layers: str | Sequence[str], part: Part = "all") -> None:
        if part not in get_args(Part):
            raise ValueError(f"part must be one of {', '.join(get_args(Part))}, got {part!r}")
        given = [layers] if isinstance(layers, str) or not isinstance(layers, Sequence) else layers
        self.texts: list[str] = []
        for item in given:
            self.texts += [text.strip() for text in item.split(",")] if isinstance(item, str) else [item]
        if not self.texts:
            raise ValueError("layers must name at least one range, got none")
        for text in self.texts:
            if text not in ("all", *get_args(NamedPart)):
                parse_range(text)
        self.part = part

    def __str__(self) -> str:
        return ", ".join(self.texts) + ("" if self.part == "all" else f" ({self.part})")

    def __repr__(self) -> str:
        return f"LayerRange({self.texts}, part={self.part!r})"

    def names(self, layer_map: LayerMap) -> list[str]:
        """Names of the parameters, in the model's order, a tied one once.

        Raises:
            ValueError: a range matches nothing, or reaches beyond the model.
        """
        chosen: set[str] = set()
        for text in self.texts:
            wanted = self._places(text, layer_map.num_layers)
            found = {
                name
                for name, place in layer_map.places.items()
                if place in wanted and (self.part == "all" or layer_map.parts.get(name) == self.part)
            }
            if not found:
                raise ValueError(f"layers must match {self._rule(text, layer_map)}, got {text!r}")
            chosen |= found
        return [name for name in layer_map.places if name in chosen]

    def parameters(self, module: nn.Module, layers_path: str | None = None) -> dict[str, nn.Parameter]:
        """The parameters of a module, by name; a tied one appears once.

        Raises:
            ValueError: a range matches nothing, or reaches beyond the model.
        """
        named = dict(module.named_parameters())
        return {name: named[name] for name in self.names(map_layers(module, layers_path))}

    def _places(self, text: str, num_layers: int) -> set[Place]:
        if text in get_args(NamedPart):
            return {text}  # type: ignore[arg-type]
        if text == "all":
            return set(range(num_layers))
        asked = parse_range(text)
        outside = [b for b in (asked.start, asked.stop) if b is not None and not -num_layers <= b <= num_layers]
        if outside:
            # Python would cut the range off, and another one than asked for would be used.
            raise ValueError(f"layers must lie within the model's {num_layers} layers (0:{num_layers}), got {text!r}")
        return set(range(num_layers)[asked])

    def _rule(self, text: str, layer_map: LayerMap) -> str:
        """What a range that matches nothing should have matched."""
        if text not in get_args(NamedPart) and self.part == "all":
            return f"at least one of the model's {layer_map.num_layers} layers"
        if text == "head" and layer_map.ties:
            return "something that the model has (its head is nothing but the tied decoder: name embeddings)"
        here = [name for name in get_args(NamedPart) if name in layer_map.places.values()]
        inside = "" if self.part == "all" else f"; part {self.part!r} is looked for in layers only"
        return f"something that the model has ({', '.join(['layers', *here])}{inside})"
