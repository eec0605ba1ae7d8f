"""Counter-based hashing: the same 64 random bits for the same counters, in NumPy and in torch, on any device.

Source: splitmix64 (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195). Nothing here has state, so nothing has to
be saved, and workers, ranks, packing and resumption cannot change what is drawn.
"""

from __future__ import annotations

import os
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

UInt64Array = npt.NDArray[np.uint64]

GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)


class Purpose(IntEnum):
    """What a draw is for: draws of different purposes are independent."""

    CHOICE = 1
    ACTION = 2
    RANDOM_ID = 3
    ROUNDING = 4
    ORDER = 5
    PACK_ORDER = 6
    DROPOUT = 7
    SPLIT = 8
    STREAM = 9


def resolve_seed(seed: int | None) -> int:
    """The seed given, else the one that Lightning's ``seed_everything`` announced, else 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0)) if seed is None else seed


def _signed(value: int) -> int:
    """The two's complement reading of 64 bits, as torch's int64 holds them."""
    return value - (1 << 64) if value >= 1 << 63 else value


def mix(value: UInt64Array) -> UInt64Array:
    """Map 64-bit integers one to one onto 64 well mixed bits: splitmix64's finaliser, any shape.

    >>> [hex(int(v)) for v in mix(np.array([GOLDEN, 2 * GOLDEN % 2**64], dtype=np.uint64))]
    ['0xe220a8397b1dcdaf', '0x6e789e6aa1b965f4']
    """
    first, second, third = (np.uint64(shift) for shift in _SHIFTS)
    value = (value ^ (value >> first)) * np.uint64(_MULTIPLIERS[0])
    value = (value ^ (value >> second)) * np.uint64(_MULTIPLIERS[1])
    return value ^ (value >> third)


def _logical_shift(value: Tensor, bits: int) -> Tensor:
    # int64 shifts drag the sign along; the mask removes it.
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def mix_torch(value: Tensor) -> Tensor:
    """`mix` for int64 tensors of any shape, bit-equal to the NumPy form read as signed numbers.

    >>> hex(mix_torch(torch.tensor(GOLDEN - 2**64)).item() % 2**64)
    '0xe220a8397b1dcdaf'
    """
    value = (value ^ _logical_shift(value, _SHIFTS[0])) * _signed(_MULTIPLIERS[0])
    value = (value ^ _logical_shift(value, _SHIFTS[1])) * _signed(_MULTIPLIERS[1])
    return value ^ _logical_shift(value, _SHIFTS[2])


def document_keys(seed: int, epoch: int, purpose: Purpose, documents: npt.NDArray[np.int64]) -> UInt64Array:
    """Give every document its key for one purpose in one epoch.

    Args:
        seed: the run's seed, any integer.
        epoch: pass over the data, 0 or more.
        purpose: what is drawn.
        documents: index of each document in its corpus, shape (N,).

    Returns:
        Keys, shape (N,).

    >>> document_keys(0, 0, Purpose.CHOICE, np.array([0, 1])).dtype
    dtype('uint64')
    """
    key = mix(np.array([seed % (1 << 64)], dtype=np.uint64))
    key = mix(key ^ np.uint64(epoch))
    key = mix(key ^ np.uint64(purpose))
    return key ^ documents.astype(np.uint64)


def uniform(keys: UInt64Array) -> npt.NDArray[np.float64]:
    """Draw one float64 in [0, 1) per key, shape as given.

    >>> bool((uniform(np.arange(9, dtype=np.uint64)) < 1).all())
    True
    """
    return (mix(keys + np.uint64(GOLDEN)) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def token_hashes(keys: Tensor, positions: Tensor) -> Tensor:
    """Hash positions under their document's key: 64 bits per token as int64, shape (T,).

    Args:
        keys: the key of each token's document, int64 (T,).
        positions: position of each token in its document (not in its pack or chunk), int64 (T,).

    >>> token_hashes(torch.tensor([7]), torch.tensor([0])).shape
    torch.Size([1])
    """
    return mix_torch(keys + positions * _signed(GOLDEN))


def key_tensor(keys: UInt64Array) -> Tensor:
    """Hand host keys to torch as int64 with the same bits, shape (N,)."""
    return torch.from_numpy(keys.view(np.int64))


def single_key(seed: int, purpose: Purpose, *counters: int) -> int:
    """Hash a few counters into one key in [0, 2^64), for draws that belong to no document.

    >>> single_key(0, Purpose.DROPOUT, 1, 2) != single_key(0, Purpose.DROPOUT, 2, 1)
    True
    """
    key = mix(np.array([seed % (1 << 64)], dtype=np.uint64))
    for counter in (int(purpose), *counters):
        key = mix(key ^ np.uint64(counter))
    return int(key[0])


def permute(indices: npt.NDArray[np.int64], size: int, key: int) -> npt.NDArray[np.int64]:
    """Send each index to its place in a pseudo-random permutation of ``range(size)``, without building it.

    A Feistel network of 8 rounds on the smallest even number of bits that holds ``size`` (4 rounds are biased for
    small sets), walked along its cycles until the value is below ``size``. Cost is that of the indices asked for.
    On 4 bits and more such a network is an even permutation: places are uniform, but not every order can occur.

    Args:
        indices: places asked for, each in [0, size), shape (N,).
        size: number of elements permuted, at least 1.
        key: which permutation, in [0, 2^64).

    >>> sorted(permute(np.arange(10), 10, key=3).tolist()) == list(range(10))
    True
    """
    half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    half_mask = np.uint64((1 << int(half_bits)) - 1)
    round_keys = mix(np.uint64(key) + np.arange(1, 9, dtype=np.uint64) * np.uint64(GOLDEN))

    def network(value: UInt64Array) -> UInt64Array:
        left, right = value >> half_bits, value & half_mask
        for round_key in round_keys:
            left, right = right, left ^ (mix(right + round_key) & half_mask)
        return (left << half_bits) | right

    with np.errstate(over="ignore"):
        value = network(indices.astype(np.uint64))
        outside = value >= np.uint64(size)
        while outside.any():
            value[outside] = network(value[outside])
            outside = value >= np.uint64(size)
    return value.astype(np.int64)
