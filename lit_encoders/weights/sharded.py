"""Sharded checkpoints (FSDP2): read piece by piece, or put together into one file for a single process.

Lightning writes them as ``torch.distributed.checkpoint`` does, a file for each process, with ``meta.pt`` for what is no
tensor.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from typing_extensions import override

from lit_encoders.weights.stored_tensor import StoredTensor

METADATA = ".metadata"
_META = "meta.pt"


def is_sharded(path: Path) -> bool:
    """Whether a path is the folder of a sharded checkpoint."""
    return (path / METADATA).is_file()


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of a flattened tensor, in a file.

    Attributes:
        start: place of the first one in the whole tensor.
        stored: where they are.
    """

    start: int
    stored: StoredTensor


@dataclass(frozen=True)
class ShardedTensor(StoredTensor):
    """A tensor whose rows lie in several files.

    Attributes:
        pieces: in order; together they are the tensor.
    """

    pieces: tuple[Piece, ...] = ()

    @override
    def read(self, start: int = 0, stop: int | None = None, out: Tensor | None = None) -> Tensor:
        end = self.numel if stop is None else stop
        block = torch.empty(end - start, dtype=self.dtype) if out is None else out[: end - start]
        for piece in self.pieces:
            first, last = max(start, piece.start), min(end, piece.start + piece.stored.numel)
            if first < last:
                into = block[first - start : last - start]
                piece.stored.read(first - piece.start, last - piece.start, into)
        return block


def read_meta(folder: Path) -> dict[str, Any]:
    """What a sharded checkpoint holds beside tensors: steps, loops, callbacks, facts."""
    meta: dict[str, Any] = torch.load(folder / _META, weights_only=True)
    return meta


def read_sharded(folder: Path) -> dict[str, StoredTensor]:
    """Find the model's tensors in a sharded checkpoint, under their names in its state, without reading them.

    Raises:
        ValueError: a tensor is not cut into whole rows.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = FileSystemReader(folder).read_metadata()
    places: dict[str, list[tuple[tuple[int, ...], Any]]] = {}
    for index, place in metadata.storage_data.items():
        places.setdefault(index.fqn, []).append((tuple(index.offset or ()), place))
    found: dict[str, StoredTensor] = {}
    for full_name, entry in metadata.state_dict_metadata.items():
        root, _, name = full_name.partition(".")
        if root == "state_dict" and isinstance(entry, TensorStorageMetadata):
            found[name] = _tensor(folder, name, entry, sorted(places[full_name], key=lambda pair: pair[0]))
    return found


def _tensor(folder: Path, name: str, entry: Any, places: list[tuple[tuple[int, ...], Any]]) -> ShardedTensor:
    shape, dtype = tuple(entry.size), entry.properties.dtype
    sizes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in entry.chunks}
    row = int(torch.Size(shape[1:]).numel())
    pieces = []
    for offset, place in places:
        size = sizes[offset]
        if any(offset[1:]) or size[1:] != shape[1:]:
            raise ValueError(f"{name} is not cut into whole rows")
        path = folder / place.relative_path
        begin = place.offset + _data_offset(path, place.offset, place.length)
        pieces.append(Piece((offset[0] if offset else 0) * row, StoredTensor(path, begin, dtype, size)))
    return ShardedTensor(folder, 0, dtype, shape, tuple(pieces))


class _Slice(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length, self._place = file, start, length, 0

    @override
    def seekable(self) -> bool:
        return True

    @override
    def readable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._length}[whence]
        return self._place

    @override
    def tell(self) -> int:
        return self._place

    @override
    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._place)
        wanted = min(len(buffer), max(0, self._length - self._place))
        got = self._file.read(wanted)
        buffer[: len(got)] = got
        self._place += len(got)
        return len(got)


def _data_offset(path: Path, start: int, length: int) -> int:
    """Where the elements of a tensor begin, inside what ``torch.save`` wrote for it into a part of a file."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with path.open("rb") as file, FakeTensorMode():
        tensor: Tensor = torch.load(io.BufferedReader(_Slice(file, start, length)), weights_only=True)
        begin = int(tensor.untyped_storage()._checkpoint_offset or 0)
        return begin + int(tensor.storage_offset()) * int(tensor.element_size())


def consolidate(folder: Path, output: Path) -> None:
    """Put a sharded checkpoint together into the file that a single process, or DDP, goes on from.

    Args:
        folder: of the sharded checkpoint.
        output: file to write.
    """
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    reader = FileSystemReader(folder)
    _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    optimizers = [state[key] for key in sorted(state) if key.startswith("optimizer_")]
    whole = {**read_meta(folder), "state_dict": state["state_dict"]}
    torch.save({**whole, "optimizer_states": [by_number(optimizer) for optimizer in optimizers]}, output)


def by_number(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Turn an optimizer's state by names of parameters into torch's own, by their places in its groups.

    >>> by_number({"state": {"b": 2, "a": 1}, "param_groups": [{"params": ["a"]}, {"params": ["b"], "lr": 3}]})
    {'state': {0: 1, 1: 2}, 'param_groups': [{'params': [0]}, {'params': [1], 'lr': 3}]}
    """
    names = [name for group in optimizer["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in optimizer["param_groups"]]
    state = {numbers[name]: optimizer["state"][name] for name in names if name in optimizer["state"]}
    return {"state": state, "param_groups": groups}
