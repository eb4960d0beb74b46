from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from danlu.data.order import Permutation

SIZES = sorted({1, 2, 3, 5, 65537, 262145, 1000003} | {2**k + d for k in range(1, 21) for d in (-1, 0, 1)})
M = 2**64
GOLDEN_TEN = [2, 5, 7, 9, 0, 3, 6, 1, 4, 8]
GOLDEN_LARGE = [246153995961, 490237699996, 81032596405]


def order(n: int, seed: int = 1, name: str = "a", epoch: int = 0) -> Permutation:
    return Permutation(n, seed=seed, name=name, epoch=epoch)


def plain(n: int, seed: int, name: str, epoch: int, index: int) -> int:
    """The same permutation from its description alone, bit by bit and with nothing shared with the code under test."""
    bits = len(bin(n - 1)) - 2 if n > 1 else 0
    left_bits, right_bits = bits // 2, bits - bits // 2
    while True:
        text = format(index, f"0{bits}b") if bits else ""
        left, right = int("0" + text[:left_bits], 2), int("0" + text[left_bits:], 2)
        for number in range(6):
            key = hashlib.blake2b(json.dumps(["danlu order 1", seed, name, epoch, number]).encode(), digest_size=8)
            z = (right if number % 2 == 0 else left) ^ int.from_bytes(key.digest(), "little")
            z = ((z ^ (z // 2**30)) * 13787848793156543929) % M
            z = ((z ^ (z // 2**27)) * 10723151780598845931) % M
            z ^= z // 2**31
            if number % 2 == 0:
                left ^= z % 2**left_bits
            else:
                right ^= z % 2**right_bits
        index = left * 2**right_bits + right
        if index < n:
            return index


@pytest.mark.parametrize("n", SIZES)
def test_every_number_comes_once_and_the_inverse_finds_it(n: int) -> None:
    found = order(n).at(np.arange(n))
    assert np.array_equal(np.bincount(found, minlength=n), np.ones(n))
    assert np.array_equal(order(n).places(found), np.arange(n))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 100, 1000, 65537, 2**40 + 7, 2**48])
def test_one_at_a_time_is_as_many_at_once(n: int) -> None:
    some = [0, n - 1, n // 2, n // 3, n // 7]
    many = order(n).at(some).tolist()
    assert [order(n)[index] for index in some] == many
    assert [order(n).place(number) for number in many] == some
    assert many == [plain(n, 1, "a", 0, index) for index in some]


def test_golden_order() -> None:
    """Made once with ``plain`` above, the second writing of the description; it may never change: runs resume by it."""
    assert order(10, seed=7, name="train", epoch=0).at(np.arange(10)).tolist() == GOLDEN_TEN
    assert [order(10**12, seed=7, name="train", epoch=3)[i] for i in (0, 1, 10**12 - 1)] == GOLDEN_LARGE
    assert [plain(10, 7, "train", 0, index) for index in range(10)] == GOLDEN_TEN


def test_seed_name_and_epoch_are_kept_apart() -> None:
    keys = [(1, "a", 0), (0, "a", 1), (1, "a", 1), (2, "a", 0), (1, "b", 0), (11, "", 0), (1, "1", 0)]
    orders = {tuple(order(50, *key).at(np.arange(50)).tolist()) for key in keys}
    assert len(orders) == len(keys)


def test_small_orders_are_spread_evenly() -> None:
    """Which number comes first, over 5,000 epochs: each of 5 within 5 standard deviations of a fifth."""
    first = np.bincount([order(5, epoch=epoch)[0] for epoch in range(5000)], minlength=5)
    assert np.abs(first - 1000).max() < 5 * np.sqrt(5000 * 0.2 * 0.8)


def test_neighbours_are_torn_apart() -> None:
    found = order(100_000).at(np.arange(100_000)).astype(float)
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.015  # 5 standard deviations of 1/sqrt(n)


@pytest.mark.parametrize("n", [0, -1, 2**48 + 1])
def test_sizes_without_an_order_are_refused(n: int) -> None:
    with pytest.raises(ValueError, match="1 to 2\\^48"):
        order(n)


def test_places_outside_are_refused() -> None:
    with pytest.raises(IndexError):
        order(10)[10]
    with pytest.raises(IndexError):
        order(10).at([3, -1])
