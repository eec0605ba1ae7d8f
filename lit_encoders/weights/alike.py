"""Whether the weights of two models can be combined: one architecture, one vocabulary, the same tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from lit_encoders.weights.checkpoint import StoredModel, Weights, under_names_of

# Entries of a configuration that do not change what a model is.
_NO_FACTS = ("dtype", "torch_dtype", "_name_or_path", "transformers_version", "architectures")
_TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "merges.txt", "spiece.model", "tokenizer.model")
# Names that a message lists before it only counts.
_LISTED = 10


def listed(names: Sequence[str]) -> str:
    """Write out names, at most ten, with their number.

    >>> listed(["a", "b"])
    '2 tensors: a, b'
    """
    more = ", ..." if len(names) > _LISTED else ""
    return f"{len(names)} tensor{'s' if len(names) != 1 else ''}: {', '.join(names[:_LISTED])}{more}"


def check_alike(ours: Weights, others: Sequence[Weights], needed: Collection[str] | None = None) -> list[Weights]:
    """Bring models under the names of the first, or say what keeps them apart.

    Args:
        ours: the model whose names count.
        others: to be combined with it.
        needed: names that all must hold; None for every one, with nothing beside them.

    Returns:
        The others, under the names of the first.

    Raises:
        ValueError: other architectures or vocabularies (both named), or tensors that are missing, too many, or of
            another shape (at most ten listed, with their number).
    """
    done = []
    for other in others:
        _check_configuration(ours, other)
        other = under_names_of(ours, other)
        names = list(ours.tensors) if needed is None else [name for name in ours.tensors if name in needed]
        missing = [name for name in names if name not in other.tensors]
        if missing:
            raise ValueError(f"'{other.source}' must hold the tensors of '{ours.source}', lacks {listed(missing)}")
        if needed is None:
            extra = [name for name in other.tensors if name not in ours.tensors]
            if extra:
                raise ValueError(
                    f"'{other.source}' must hold the tensors of '{ours.source}' alone, has {listed(extra)}"
                )
        shapes = [name for name in names if ours.tensors[name].shape != other.tensors[name].shape]
        if shapes:
            name = shapes[0]
            sizes = f"{list(ours.tensors[name].shape)} and {list(other.tensors[name].shape)}"
            raise ValueError(
                f"models must have tensors of the same shapes, got {sizes} for {name} in '{ours.source}' and "
                f"'{other.source}' ({listed(shapes)})"
            )
        _check_tokenizers(ours, other)
        done.append(other)
    return done


def alike_as_stored(models: Sequence[StoredModel]) -> bool:
    """Whether models are folders with one configuration, one tokenizer's files, and the same names and shapes."""
    first = models[0]
    shapes = {name: tensor.shape for name, tensor in first.tensors.items()}
    return first.folder is not None and all(
        _facts(model) == _facts(first)
        and {name: tensor.shape for name, tensor in model.tensors.items()} == shapes
        and _same_tokenizer_files(first, model)
        for model in models[1:]
    )


def _facts(model: StoredModel) -> dict[str, Any]:
    """A configuration without what says nothing of the model."""
    return {key: value for key, value in model.settings.items() if key not in _NO_FACTS}


def _same_tokenizer_files(ours: StoredModel, other: StoredModel) -> bool:
    if ours.folder is None or other.folder is None:
        return ours.folder == other.folder and ours.tokenizer == other.tokenizer
    files = [[folder / name for name in _TOKENIZER_FILES] for folder in (ours.folder, other.folder)]
    return all(
        a.is_file() == b.is_file() and (not a.is_file() or a.read_bytes() == b.read_bytes())
        for a, b in zip(*files, strict=True)
    )


def _check_configuration(ours: Weights, other: Weights) -> None:
    where = f"in '{ours.source}' and '{other.source}'"
    for name, what in (
        ("model_type", "one architecture"),
        ("vocab_size", "one vocabulary"),
        ("num_hidden_layers", "the same number of layers"),
        ("hidden_size", "the same hidden size"),
    ):
        values = [model.settings.get(name) for model in (ours, other)]
        if values[0] != values[1] and None not in values:
            named = "" if name == "model_type" else f"{name} "
            raise ValueError(f"models must have {what}, got {named}{values[0]} and {values[1]} {where}")
    if bool(ours.layer_map.ties) != bool(other.layer_map.ties) and ours.architecture == other.architecture:
        raise ValueError(
            f"models must both tie their embeddings or neither, got {_tied(ours)} and {_tied(other)} {where}"
        )


def _tied(model: Weights) -> str:
    return "tied" if model.layer_map.ties else "untied"


def _check_tokenizers(ours: Weights, other: Weights) -> None:
    """Refuse two tokenizers that give one id to different tokens; a model without a tokenizer is taken as it is."""
    if _same_tokenizer_files(ours, other):
        return
    first, second = ours.load_tokenizer(), other.load_tokenizer()
    if first is None or second is None:
        return
    mine, theirs = first.get_vocab(), second.get_vocab()
    different = sum(theirs.get(token) != number for token, number in mine.items())
    if different or len(mine) != len(theirs):
        raise ValueError(
            f"models must have one vocabulary, got {len(mine)} and {len(theirs)} tokens, {different} under another id, "
            f"in '{ours.source}' and '{other.source}'"
        )
