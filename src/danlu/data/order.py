"""The order of samples: a permutation computed, never stored.

A Feistel network over the smallest power of two that holds n numbers, walked on until it lands below n (at most one
step more on average, because the domain is less than 2 n). The halves may differ by one bit. Nothing is kept but six
round keys, so any place of any epoch is found at once.

M. Luby, C. Rackoff, "How to construct pseudorandom permutations from pseudorandom functions", 1988; J. Black,
P. Rogaway, "Ciphers with arbitrary finite domains", 2002 (cycle walking); the round function is the finaliser of
SplitMix64 (G. Steele and others, 2014).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

ROUNDS = 6
LARGEST = 2**48  # numbers that one permutation may hold
MASK = 2**64 - 1


class Permutation:
    """The numbers 0 … n - 1 in an order that (seed, name, epoch) alone settle.

    It is the same on every machine, for every count of ranks and workers. Raises ValueError where n is not 1 … 2^48.
    """

    def __init__(self, n: int, *, seed: int, name: str, epoch: int) -> None:
        if not 1 <= n <= LARGEST:
            raise ValueError(f"an order holds 1 to 2^48 numbers, not {n}")
        self.n = n
        bits = (n - 1).bit_length()
        self.right = bits - bits // 2  # bits of the right half; the left half has as many, or one less
        self.masks = (1 << bits // 2) - 1, (1 << self.right) - 1
        self.keys = [_key(seed, name, epoch, number) for number in range(ROUNDS)]

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        """The number at a place."""
        return self._walk_one(index, self._forward)

    def place(self, number: int) -> int:
        """Where a number stands: the inverse."""
        return self._walk_one(number, self._backward)

    def at(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The numbers at many places, in the shape that is given."""
        return self._walk_many(indices, self._forward)

    def places(self, numbers: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Where many numbers stand."""
        return self._walk_many(numbers, self._backward)

    def _walk_one(self, value: int, turn: Callable[[Any], Any]) -> int:
        if not 0 <= value < self.n:
            raise IndexError(f"{value} of {self.n}")
        value = turn(int(value))
        while value >= self.n:
            value = turn(value)
        return value

    def _walk_many(self, values: npt.ArrayLike, turn: Callable[[Any], Any]) -> npt.NDArray[np.int64]:
        given = np.asarray(values)
        if given.size and not (given.min() >= 0 and given.max() < self.n):
            raise IndexError(f"{given.min()} … {given.max()} of {self.n}")
        found = turn(given.astype(np.uint64).reshape(-1))
        outside = np.flatnonzero(found >= self.n)
        while outside.size:
            found[outside] = turn(found[outside])
            outside = outside[found[outside] >= self.n]
        return found.astype(np.int64).reshape(given.shape)

    def _forward(self, x: Any) -> Any:
        left, right = x >> self.right, x & self.masks[1]
        for number in range(ROUNDS):
            left, right = self._turn(number, left, right)
        return left << self.right | right

    def _backward(self, x: Any) -> Any:
        left, right = x >> self.right, x & self.masks[1]
        for number in reversed(range(ROUNDS)):  # each round undoes itself: it only adds bits of the other half
            left, right = self._turn(number, left, right)
        return left << self.right | right

    def _turn(self, number: int, left: Any, right: Any) -> tuple[Any, Any]:
        if number % 2 == 0:
            return left ^ (_mix(right ^ self.keys[number]) & self.masks[0]), right
        return left, right ^ (_mix(left ^ self.keys[number]) & self.masks[1])


def _key(seed: int, name: str, epoch: int, number: int) -> int:
    """64 bits for one round. JSON keeps the parts apart: (1, "2", 3) is never (12, "", 3)."""
    text = json.dumps(["danlu order 1", seed, name, epoch, number])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _mix(x: Any) -> Any:
    """64 bits well mixed: of a Python integer, or of each number in a uint64 array."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31
