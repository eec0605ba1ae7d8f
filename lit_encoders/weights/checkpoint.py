"""Models on disk, read block by block: Hugging Face folders, hub names and training checkpoints."""

from __future__ import annotations

import json
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lit_encoders.data.examples import model_source
from lit_encoders.models.layer_range import LayerMap, map_layers
from lit_encoders.models.skeleton import skeleton
from lit_encoders.models.stored_names import GEMMA3_TEXT_TOWER, OLD_NORMS
from lit_encoders.weights.names import match_names
from lit_encoders.weights.sharded import is_sharded, read_meta, read_sharded
from lit_encoders.weights.stored_tensor import StoredTensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SAFETENSORS_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
TYPE_NAMES = {dtype: name for name, dtype in _SAFETENSORS_TYPES.items()}


@dataclass(frozen=True)
class StoredModel:
    """A model on disk as it lies there; transformers is not needed to look at it.

    Attributes:
        source: what the user wrote.
        key: the option that it was given with, for messages.
        folder: of the Hugging Face files beside the weights; None for a training checkpoint.
        settings: its configuration, as in ``config.json``.
        tensors: by stored name.
        tokenizer: folder or hub name of the tokenizer.
    """

    source: str
    key: str
    folder: Path | None
    settings: dict[str, Any]
    tensors: dict[str, StoredTensor]
    tokenizer: str

    def load_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer; None where there is none."""
        from lit_encoders.models.vocabulary import load_tokenizer

        try:
            return load_tokenizer(self.tokenizer, "tokenizer")
        except ValueError:
            return None


@dataclass(frozen=True)
class Weights(StoredModel):
    """A model on disk under its own names: of its tensors a tied one stands once, under the name it is listed by.

    What the model has no place for keeps its stored name.

    Attributes:
        layer_map: where each of the model's parameters stands.
        shapes: of the model's own parameters and buffers, by name.
        architecture: the model's class in transformers.
    """

    layer_map: LayerMap
    shapes: dict[str, tuple[int, ...]]
    architecture: str


def open_weights(source: str, key: str) -> Weights:
    """Open a model for reading, under its own names; no weight is read yet.

    Args:
        source: Hugging Face folder or hub name, ``example:NAME``, or a checkpoint that a run of this library kept.
        key: the option that the user wrote, for messages.

    Raises:
        ValueError: no such model, no weights in it, or a configuration that transformers does not know.
    """
    return on_the_model(open_stored(source, key))


def open_stored(source: str, key: str) -> StoredModel:
    """Open a model for reading, under the names in its files; see `open_weights`."""
    path = Path(source)
    with _in_the_name_of(key, source):
        if path.is_file() or is_sharded(path):
            return _open_checkpoint(path, key)
        folder = _folder(model_source(source))
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return StoredModel(source, key, folder, settings, _stored_tensors(folder), str(folder))


@contextmanager
def _in_the_name_of(key: str, source: str) -> Iterator[None]:
    """Give errors of reading a model the option and the value that they come from."""
    try:
        yield
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{key} must be a Hugging Face folder, a hub name or a training checkpoint, got '{source}' ({reason:.160})"
        ) from error


def _folder(source: str) -> Path:
    """The folder of a model, fetched from the hub where it is no folder here."""
    if Path(source).is_dir():
        return Path(source)
    if source.startswith((".", "/")) or source.count("/") > 1:
        raise ValueError("no such folder")
    from huggingface_hub import snapshot_download

    names = ["*.json", "*.txt", "*.model", "*.safetensors"]
    return Path(snapshot_download(source, allow_patterns=names))


def _stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Everything in a folder's weight files, by stored name; safetensors before PyTorch's own format."""
    for name, read in (("model.safetensors", read_safetensors), ("pytorch_model.bin", read_torch_file)):
        index = folder / f"{name}.index.json"
        files = [folder / name] if (folder / name).is_file() else []
        if not files and index.is_file():
            files = sorted({folder / shard for shard in json.loads(index.read_text())["weight_map"].values()})
        if files:
            return {key: tensor for file in files for key, tensor in read(file).items()}
    raise ValueError("it holds no model.safetensors")


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Read the header of a safetensors file: eight bytes of length, JSON, then the tensors' bytes.

    Raises:
        ValueError: not such a file, or one that is cut off.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            raise ValueError(f"{path.name} is cut off or no safetensors file")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        if entry["dtype"] not in _SAFETENSORS_TYPES:
            raise ValueError(f"{path.name}: {name} has a type that is not supported, {entry['dtype']}")
        begin, end = entry["data_offsets"]
        if 8 + length + end > size:
            raise ValueError(f"{path.name} is cut off")
        dtype, shape = _SAFETENSORS_TYPES[entry["dtype"]], tuple(entry["shape"])
        found[name] = StoredTensor(path, 8 + length + begin, dtype, shape)
        if end - begin != found[name].numel * dtype.itemsize:
            raise ValueError(f"{path.name}: {name} has {end - begin} bytes, which are not its shape's")
    return found


def read_torch_file(path: Path) -> dict[str, StoredTensor]:
    """Find the tensors of a state that ``torch.save`` wrote, without reading them.

    Raises:
        ValueError: the file holds no state of plain tensors.
    """
    state = _without_data(path)
    if not isinstance(state, Mapping):
        raise ValueError(f"{path.name} holds no state, but a {type(state).__name__}")
    return _stored(state, path)


def _without_data(path: Path) -> Any:
    """What a file of ``torch.save`` holds, with tensors that know their place in the file and have no data."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path.name} is no file that torch.save wrote")
    try:
        with FakeTensorMode():
            return torch.load(path, weights_only=True)
    except Exception as error:  # Pickles fail in many ways, and none of them is the user's code.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path.name} holds more than plain tensors ({reason:.100})") from error


def _stored(state: Mapping[str, Any], path: Path) -> dict[str, StoredTensor]:
    found = {}
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            continue
        begin = tensor.untyped_storage()._checkpoint_offset
        if begin is None or not tensor.is_contiguous():
            raise ValueError(f"{path.name}: {name} is not stored row by row")
        offset = begin + int(tensor.storage_offset()) * tensor.element_size()
        found[name] = StoredTensor(path, offset, tensor.dtype, tuple(tensor.shape))
    return found


def _open_checkpoint(path: Path, key: str) -> StoredModel:
    """Open the model in a training checkpoint; heads and parts beside the model are no part of it."""
    sharded = is_sharded(path)
    saved = read_meta(path) if sharded else _without_data(path)
    facts = saved.get("lit_encoders") if isinstance(saved, dict) else None
    if facts is None:
        raise ValueError("it is no checkpoint of a LitEncoder")
    settings = {**json.loads(facts["config"]), "architectures": None}
    tensors = read_sharded(path) if sharded else _stored(saved["state_dict"], path)
    if any(name.startswith("backbone.model.") for name in tensors):
        tensors = {name: tensor for name, tensor in tensors.items() if name.startswith("backbone.model.")}
    return StoredModel(str(path), key, None, settings, tensors, facts["tokenizer"])


def _renamed(tensors: Mapping[str, StoredTensor], renames: Mapping[str, str]) -> dict[str, StoredTensor]:
    done = {}
    for name, tensor in tensors.items():
        for pattern, new in renames.items():
            name = re.sub(pattern, new, name)
        done[name] = tensor
    return done


def on_the_model(stored: StoredModel) -> Weights:
    """Give a stored model the names of the model that its configuration describes.

    Raises:
        ValueError: the configuration is not known, no name fits, or a tensor has another shape than it says.
    """
    from transformers import AutoConfig

    with _in_the_name_of(stored.key, stored.source):
        settings = dict(stored.settings)
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        if config.model_type == "gemma3":  # The text tower of a model that also sees.
            config = config.text_config
            config.architectures = ["Gemma3ForCausalLM"]
        model = skeleton(config)
    renames = OLD_NORMS | (GEMMA3_TEXT_TOWER if config.model_type == "gemma3_text" else {})
    files = _renamed(stored.tensors, renames)
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    layer_map = map_layers(model)
    found = match_names(list(own), files)
    if not found:
        raise ValueError(
            f"{stored.key} must hold weights of a {type(model).__name__}, got none of its names in '{stored.source}'"
        )
    tensors: dict[str, StoredTensor] = {}
    for name in own:
        # A tied weight may be stored under either name, or under both.
        listed = layer_map.ties.get(name, name)
        if name in found and (listed not in tensors or listed == name):
            tensors[listed] = files[found[name]]
    used = set(found.values())
    tensors |= {name: tensor for name, tensor in files.items() if name not in used}
    wrong = [name for name, tensor in tensors.items() if name in own and own[name] != tensor.shape]
    if wrong:
        raise ValueError(
            f"{stored.key} must hold the tensors that its configuration describes, got {wrong[0]} of shape "
            f"{list(tensors[wrong[0]].shape)} instead of {list(own[wrong[0]])} in '{stored.source}'"
        )
    settings = stored.settings if settings.get("text_config") is None else config.to_diff_dict()
    settings = {**settings, "architectures": [type(model).__name__]}
    return Weights(
        stored.source, stored.key, stored.folder, settings, tensors, stored.tokenizer,
        layer_map=layer_map, shapes=own, architecture=type(model).__name__,
    )  # fmt: skip


def under_names_of(template: StoredModel, other: Weights) -> Weights:
    """Give a model the names of another, where one of the two has a prefix on them (an encoder without its LM head)."""
    found = match_names(list(template.tensors), list(other.tensors))
    back = {theirs: ours for ours, theirs in found.items()}
    return replace(other, tensors={back.get(name, name): tensor for name, tensor in other.tensors.items()})
