"""A tensor in a file, read block by block."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


def as_bytes(block: Tensor) -> memoryview:
    """The memory of a flat tensor on the CPU, as bytes that can be read and written; nothing is copied."""
    return memoryview(block.view(torch.uint8).numpy())  # type: ignore[arg-type]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, row-major.

    Attributes:
        path: the file.
        offset: of its first byte.
        dtype: of its elements.
        shape: of the whole.
    """

    path: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return int(torch.Size(self.shape).numel())

    def read(self, start: int = 0, stop: int | None = None, out: Tensor | None = None) -> Tensor:
        """Read elements ``start`` to ``stop`` of the flattened tensor.

        The file is opened anew and read, not mapped: pages of a map that stays open count as memory in use.

        Args:
            start: first element.
            stop: the one after the last; None for the end.
            out: a flat tensor of at least so many elements and the type, to read into.

        Raises:
            ValueError: the file ends before them.
        """
        count = (self.numel if stop is None else stop) - start
        block = torch.empty(count, dtype=self.dtype) if out is None else out[:count]
        if count:
            view = as_bytes(block)
            file = os.open(self.path, os.O_RDONLY)
            try:
                place, offset = 0, self.offset + start * self.dtype.itemsize
                while place < len(view):
                    got = os.preadv(file, [view[place:]], offset + place)
                    if not got:
                        raise ValueError(f"weights must be whole, got a file that is cut off: '{self.path}'")
                    place += got
            finally:
                os.close(file)
        return block

    def load(self) -> Tensor:
        """Read the whole tensor, in its shape."""
        return self.read().reshape(self.shape)
