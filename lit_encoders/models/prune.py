"""Smaller models out of larger ones: whole layers, attention heads, MLP neurons and hidden dimensions taken away.

Sources: block influence, Men et al. (2024), ShortGPT, arXiv:2403.03853; width by the size of activations, Muralidharan
et al. (2024), Minitron, arXiv:2407.14679. UltraBERT (Park, Lee, Kang 2026) prunes its students from a teacher and does
not say by which criterion.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lit_encoders.models.layers import find_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Family:
    """Where a family of models has what can be pruned, by names inside a layer.

    Attributes:
        mlp_in: linear maps whose rows are neurons; ``gates`` of them lie in one matrix.
        mlp_out: linear map whose columns are neurons.
        gates: how many maps of the neurons ``mlp_in`` holds in one matrix, one after the other.
        attention_in: of queries, and of keys and values, where heads can be taken away.
        attention_out: linear map whose columns are heads.
        hidden: whether the hidden size can be pruned.
        first_layer_stays: whether the first layer differs from the others, so that none can take its place.
    """

    mlp_in: tuple[str, ...]
    mlp_out: str
    gates: int = 1
    attention_in: tuple[str, ...] = ()
    attention_out: str = ""
    hidden: bool = False
    first_layer_stays: bool = False


_BERT = Family(("intermediate.dense",), "output.dense")
# Heads of BERT and ModernBERT are hidden_size / heads wide by definition: fewer of them could not be written down.
FAMILIES: Mapping[str, Family] = {
    "bert": _BERT,
    "camembert": _BERT,
    "electra": _BERT,
    "modernbert": Family(("mlp.Wi",), "mlp.Wo", gates=2, first_layer_stays=True),
    "roberta": _BERT,
    "ultrabert": Family(
        ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down_proj",
        attention_in=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        attention_out="self_attn.o_proj",
        hidden=True,
    ),
    "xlm-roberta": _BERT,
}


@dataclass(frozen=True)
class Sizes:
    """What a pruned model has; None leaves a size as it is.

    Attributes:
        layers: number of layers, or which ones, ascending.
        heads: attention heads of each layer.
        mlp: neurons of each feed-forward.
        hidden: hidden size.
    """

    layers: int | Sequence[int] | None = None
    heads: int | None = None
    mlp: int | None = None
    hidden: int | None = None


@dataclass
class Statistics:
    """What a calibration text makes a model do, as sums over its tokens in float64.

    Attributes:
        influence: of each layer, 1 - cosine between what enters and what leaves it, (L,).
        neurons: of each layer, squared activations of its MLP neurons, (I,).
        heads: of each layer, squared outputs of its attention, by dimension, (heads x head size,).
        hidden: squared outputs of the norms, by dimension, (D,).
        tokens: how many were seen.
    """

    influence: Tensor
    neurons: list[Tensor] = field(default_factory=list)
    heads: list[Tensor] = field(default_factory=list)
    hidden: Tensor | None = None
    tokens: int = 0


def block_influence(before: Tensor, after: Tensor) -> Tensor:
    """How much a layer turns its input, 1 - cosine, summed over tokens: (T, D), (T, D) -> scalar, float64.

    >>> block_influence(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]])).item()
    1.0
    """
    return (1.0 - torch.nn.functional.cosine_similarity(before.double(), after.double(), dim=-1)).sum()


def keep_largest(scores: Tensor, count: int) -> Tensor:
    """Places of the largest scores, ascending; of equals the first: (N,) -> (count,).

    >>> keep_largest(torch.tensor([1.0, 3.0, 2.0, 3.0]), 2).tolist()
    [1, 3]
    """
    return torch.argsort(scores, descending=True, stable=True)[:count].sort().values


@contextmanager
def watch(model: PreTrainedModel) -> Iterator[Statistics]:
    """Gather statistics of all that the model reads inside the block.

    Raises:
        ValueError: a model that cannot be pruned.
    """
    family, layers = family_of(model), find_layers(model)[1]
    found = Statistics(torch.zeros(len(layers), dtype=torch.float64))
    found.neurons = [torch.zeros(0, dtype=torch.float64)] * len(layers)
    found.heads = [torch.zeros(0, dtype=torch.float64)] * len(layers)
    hooks = []

    def squares(x: Tensor) -> Tensor:
        return x.detach().reshape(-1, x.shape[-1]).double().square().sum(0)

    def add(store: list[Tensor], number: int) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any) -> None:
            total = squares(arguments[0])
            store[number] = store[number] + total if len(store[number]) else total

        return hook

    def influence(number: int) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, kwargs: Any, output: Any) -> None:
            before = arguments[0] if arguments else kwargs["hidden_states"]
            after = output[0] if isinstance(output, tuple) else output
            size = before.shape[-1]
            found.influence[number] += block_influence(before.reshape(-1, size), after.reshape(-1, size))
            found.tokens += before.numel() // size if number == 0 else 0

        return hook

    def norm(module: nn.Module, arguments: Any, output: Tensor) -> None:
        found.hidden = squares(output) if found.hidden is None else found.hidden + squares(output)

    for number, layer in enumerate(layers):
        hooks.append(layer.register_forward_hook(influence(number), with_kwargs=True))
        hooks.append(layer.get_submodule(family.mlp_out).register_forward_pre_hook(add(found.neurons, number)))
        if family.attention_out:
            hooks.append(layer.get_submodule(family.attention_out).register_forward_pre_hook(add(found.heads, number)))
        if family.hidden:
            hooks += [child.register_forward_hook(norm) for child in layer.modules() if "Norm" in type(child).__name__]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def family_of(model: PreTrainedModel) -> Family:
    """The family of a model.

    Raises:
        ValueError: it is of none that can be pruned.
    """
    kind = model.config.model_type
    if kind not in FAMILIES:
        raise ValueError(f"model must be of a family that can be pruned ({', '.join(FAMILIES)}), got {kind!r}")
    return FAMILIES[kind]


def check_sizes(model: PreTrainedModel, sizes: Sizes) -> None:
    """Refuse sizes that the model cannot be brought to.

    Raises:
        ValueError: with the size's name, the rule and the value.
    """
    family, config = family_of(model), model.config
    total = len(find_layers(model)[1])
    if isinstance(sizes.layers, int):
        if not 1 <= sizes.layers <= total:
            raise ValueError(f"layers must be between 1 and the model's {total}, got {sizes.layers}")
    elif sizes.layers is not None:
        given = list(sizes.layers)
        if not given or given != sorted(set(given)) or not all(0 <= number < total for number in given):
            raise ValueError(f"layers must be numbers below {total} in ascending order, each once, got {given}")
        if family.first_layer_stays and given[0] != 0:
            raise ValueError(
                f"layers of a {config.model_type} must hold layer 0, which differs from the others, got {given}"
            )
    for name, value, most in (
        ("mlp", sizes.mlp, config.intermediate_size),
        ("hidden", sizes.hidden, config.hidden_size),
    ):
        if value is not None and not 1 <= value <= most:
            raise ValueError(f"{name} must be between 1 and the model's {most}, got {value}")
    if sizes.hidden is not None and not family.hidden:
        raise ValueError(f"hidden can be pruned for ultrabert alone, got {sizes.hidden} for {config.model_type}")
    if sizes.heads is not None:
        if not family.attention_in:
            raise ValueError(
                f"heads of a {config.model_type} must stay {config.num_attention_heads}: they are hidden_size / heads "
                f"wide, so fewer could not be written down, got {sizes.heads}"
            )
        groups = config.num_attention_heads // config.num_key_value_heads
        if not 1 <= sizes.heads <= config.num_attention_heads or sizes.heads % groups:
            raise ValueError(
                f"heads must be a multiple of {groups} (queries to a key head) up to {config.num_attention_heads}, "
                f"got {sizes.heads}"
            )
    if family.hidden:
        # transformers refuses such a configuration, although its heads have a size of their own.
        hidden, heads = sizes.hidden or config.hidden_size, sizes.heads or config.num_attention_heads
        if hidden % heads:
            raise ValueError(f"hidden must be a multiple of the {heads} heads, got {hidden}")


def prune(model: PreTrainedModel, sizes: Sizes, statistics: Statistics) -> PreTrainedModel:
    """Make a smaller model: layers that turn their input most; heads, neurons and dimensions that are used most.

    Args:
        model: stays as it is.
        sizes: of the result.
        statistics: of the model, on a calibration text.

    Raises:
        ValueError: sizes that the model cannot be brought to.
    """
    check_sizes(model, sizes)
    family, (path, layers) = family_of(model), find_layers(model)
    kept = _kept_layers(family, sizes, statistics, len(layers))
    config = copy.deepcopy(model.config)
    # Of each tensor, what is kept along its dimensions.
    cuts: dict[str, dict[int, Tensor]] = {}

    def cut(name: str, dimension: int, places: Tensor) -> None:
        cuts.setdefault(name, {})[dimension] = places

    for number in kept:
        inside = f"{path}.{number}."
        if sizes.mlp is not None:
            width = len(statistics.neurons[number])
            neurons = keep_largest(statistics.neurons[number], sizes.mlp)
            rows = torch.cat([neurons + gate * width for gate in range(family.gates)])
            for name in family.mlp_in:
                cut(f"{inside}{name}.weight", 0, rows)
                cut(f"{inside}{name}.bias", 0, rows)
            cut(f"{inside}{family.mlp_out}.weight", 1, neurons)
        if sizes.heads is not None:
            _cut_heads(config, family, sizes.heads, statistics.heads[number], inside, cut)
    if sizes.hidden is not None:
        assert statistics.hidden is not None
        _cut_hidden(model, keep_largest(statistics.hidden, sizes.hidden), cut)
    if sizes.mlp is not None:
        config.intermediate_size = sizes.mlp
    if sizes.heads is not None:
        groups = config.num_attention_heads // config.num_key_value_heads
        config.head_dim = _head_size(config)
        config.num_attention_heads, config.num_key_value_heads = sizes.heads, sizes.heads // groups
    if sizes.hidden is not None:
        config.head_dim = _head_size(model.config)
        config.hidden_size = sizes.hidden
    config.num_hidden_layers = len(kept)
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [model.config.layer_types[number] for number in kept]
    smaller: Any = type(model)(config)
    # Before the values come, so that none is rounded; not the buffers: rotary frequencies stay in float32.
    for parameter in smaller.parameters():
        parameter.data = parameter.data.to(next(model.parameters()).dtype)
    smaller.load_state_dict(_cut_state(model, path, kept, cuts), strict=True)
    return smaller.eval()  # type: ignore[no-any-return]


def _kept_layers(family: Family, sizes: Sizes, statistics: Statistics, total: int) -> list[int]:
    if sizes.layers is None:
        return list(range(total))
    if not isinstance(sizes.layers, int):
        return list(sizes.layers)
    scores = statistics.influence.clone()
    if family.first_layer_stays:
        scores[0] = float("inf")
    return keep_largest(scores, sizes.layers).tolist()  # type: ignore[no-any-return]


def _head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _cut_heads(
    config: Any, family: Family, heads: int, squares: Tensor, inside: str, cut: Callable[[str, int, Tensor], None]
) -> None:
    """Take the groups of heads that say most; the queries of one key head stay together."""
    size, groups = _head_size(config), config.num_attention_heads // config.num_key_value_heads
    scores = squares.reshape(config.num_key_value_heads, -1).sum(1)
    chosen = keep_largest(scores, heads // groups)

    def places(width: int) -> Tensor:
        return (chosen[:, None] * width + torch.arange(width)).flatten()

    queries, *keys = family.attention_in
    for name, width in ((queries, groups * size), *((key, size) for key in keys)):
        cut(f"{inside}{name}.weight", 0, places(width))
        cut(f"{inside}{name}.bias", 0, places(width))
    cut(f"{inside}{family.attention_out}.weight", 1, places(groups * size))


def _cut_hidden(model: PreTrainedModel, places: Tensor, cut: Callable[[str, int, Tensor], None]) -> None:
    """Keep some dimensions of the residual stream wherever it is read or written."""
    embeddings = model.get_input_embeddings()
    for name, module in model.named_modules():
        if module is embeddings:
            cut(f"{name}.weight", 1, places)
        elif "Norm" in type(module).__name__:
            cut(f"{name}.weight", 0, places)
        elif isinstance(module, nn.Linear):
            # Into the stream: what a layer adds, and what the head hands to its decoder. All others read it.
            writes = name.endswith(("o_proj", "down_proj", "linear2"))
            cut(f"{name}.weight", 0 if writes else 1, places)
            if writes:
                cut(f"{name}.bias", 0, places)


def _cut_state(
    model: PreTrainedModel, path: str, kept: Iterable[int], cuts: Mapping[str, Mapping[int, Tensor]]
) -> dict[str, Tensor]:
    new_numbers = {number: place for place, number in enumerate(kept)}
    state = {}
    for name, tensor in model.state_dict().items():
        for dimension, places in cuts.get(name, {}).items():
            tensor = tensor.index_select(dimension, places.to(tensor.device))
        if name.startswith(f"{path}."):
            number, _, inside = name.removeprefix(f"{path}.").partition(".")
            if int(number) not in new_numbers:
                continue
            name = f"{path}.{new_numbers[int(number)]}.{inside}"
        state[name] = tensor.contiguous()
    return state
