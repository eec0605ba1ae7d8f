"""Counter-based hashing against published values and against chance."""

from itertools import permutations

import numpy as np
import pytest
import torch

from lit_encoders.objectives.hashing import (
    Purpose,
    document_keys,
    key_tensor,
    mix,
    mix_torch,
    permute,
    resolve_seed,
    single_key,
    token_hashes,
    uniform,
)

GOLDEN = 0x9E3779B97F4A7C15
# First outputs of splitmix64 from state 0, as its author publishes them (prng.di.unimi.it/splitmix64.c).
PUBLISHED = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
MASK = 2**64 - 1


def splitmix64(value: int) -> int:
    """The finaliser in unbounded Python integers."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def random_bits(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 2**64, count, dtype=np.uint64)


def chi_square(counts: np.ndarray, cells: int) -> float:
    expected = counts.sum() / cells
    return float(((counts - expected) ** 2 / expected).sum() + (cells - len(counts)) * expected)


def test_mix_gives_the_published_stream() -> None:
    states = np.array([GOLDEN * step & MASK for step in (1, 2, 3)], np.uint64)
    assert mix(states).tolist() == PUBLISHED


def test_token_hashes_are_the_published_stream_under_key_zero() -> None:
    hashes = token_hashes(torch.zeros(3, dtype=torch.int64), torch.arange(1, 4))
    assert [value % 2**64 for value in hashes.tolist()] == PUBLISHED


def test_numpy_and_torch_agree_bit_for_bit() -> None:
    values = random_bits(100_000)
    values[:4] = [0, 1, 2**63, MASK]
    assert np.array_equal(mix_torch(key_tensor(values)).numpy().view(np.uint64), mix(values))


def test_torch_agrees_with_unbounded_integers_for_any_position() -> None:
    keys = random_bits(200)
    positions = np.random.default_rng(1).integers(-2, 2**40, 200)
    expected = [splitmix64((int(key) + int(place) * GOLDEN) & MASK) for key, place in zip(keys, positions, strict=True)]
    hashes = token_hashes(key_tensor(keys), torch.from_numpy(positions))
    assert hashes.numpy().view(np.uint64).tolist() == expected


@pytest.mark.parametrize("seed", [0, 7, -1, 2**64 + 3])
def test_document_keys_are_the_chain_of_seed_epoch_purpose_document(seed: int) -> None:
    chain = splitmix64(splitmix64(splitmix64(seed & MASK) ^ 5) ^ Purpose.ACTION)
    keys = document_keys(seed, 5, Purpose.ACTION, np.array([0, 1, 10**9]))
    assert keys.tolist() == [chain ^ document for document in (0, 1, 10**9)]


def test_single_key_is_the_chain_of_its_counters() -> None:
    chain = splitmix64(splitmix64(splitmix64(splitmix64(3) ^ Purpose.DROPOUT) ^ 8) ^ 2)
    assert single_key(3, Purpose.DROPOUT, 8, 2) == chain


def test_keys_differ_by_seed_epoch_purpose_and_document() -> None:
    documents = np.arange(50)
    keys = {
        int(key)
        for seed in range(4)
        for epoch in range(4)
        for purpose in Purpose
        for key in mix(document_keys(seed, epoch, purpose, documents))
    }
    assert len(keys) == 4 * 4 * len(Purpose) * 50


def test_uniform_takes_the_upper_53_bits() -> None:
    assert uniform(np.zeros(1, np.uint64)).tolist() == [(PUBLISHED[0] >> 11) / 2**53]


def test_uniform_is_uniform_and_free_of_neighbour_correlation() -> None:
    draws = uniform(document_keys(0, 0, Purpose.ROUNDING, np.arange(100_000)))
    assert draws.min() >= 0
    assert draws.max() < 1
    # 99.9 % quantile of chi-square with 63 degrees of freedom.
    assert chi_square(np.bincount((draws * 64).astype(int), minlength=64), 64) < 103.4
    # The lowest of the 53 bits are as even as the highest.
    assert abs((draws * 2**53 % 2).mean() - 0.5) < 0.005
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.01


@pytest.mark.parametrize("size", [1, 2, 3, 10, 1000, 65_537])
def test_permute_is_a_permutation(size: int) -> None:
    for key in (0, 1, MASK):
        assert np.array_equal(np.sort(permute(np.arange(size), size, key)), np.arange(size))


def test_permute_answers_for_the_indices_asked_for() -> None:
    whole = permute(np.arange(1000), 1000, 9)
    places = np.array([999, 0, 500])
    assert permute(places, 1000, 9).tolist() == whole[places].tolist()
    assert not np.array_equal(whole, permute(np.arange(1000), 1000, 10))


def test_permute_gives_every_order_of_four_alike() -> None:
    """Four rounds instead of eight give a chi-square near 190 here."""
    orders = dict.fromkeys(permutations(range(4)), 0)
    for key in range(6000):
        orders[tuple(permute(np.arange(4), 4, key).tolist())] += 1
    assert chi_square(np.array(list(orders.values())), 24) < 49.7  # 99.9 %, 23 degrees of freedom


def test_permute_sends_pairs_anywhere_alike() -> None:
    """Ten needs cycle walking. Pairs, not whole orders: a Feistel network is even, so parity is not free."""
    pairs = np.array([permute(np.array([0, 1]), 10, key) for key in range(6000)])
    counts = np.bincount(pairs[:, 0] * 10 + pairs[:, 1], minlength=100)
    assert counts[::11].sum() == 0
    assert chi_square(counts[counts > 0], 90) < 135.98  # 99.9 %, 89 degrees of freedom


def test_seed_is_the_one_given_else_the_announced_one_else_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    assert resolve_seed(None) == 0
    monkeypatch.setenv("PL_GLOBAL_SEED", "42")
    assert resolve_seed(None) == 42
    assert resolve_seed(0) == 0
