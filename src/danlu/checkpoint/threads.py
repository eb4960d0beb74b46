"""The same work on many things, by several threads: copying, hashing and reading leave the interpreter free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")
MOST = 8  # threads; more do not make a disk or a memory faster


def count() -> int:
    """Threads to use: this process's share of the cores, as torch was told."""
    return min(MOST, torch.get_num_threads())


def in_shares(work: Callable[[list[T]], R], things: Iterable[T], *, size: Callable[[T], int]) -> Iterator[R]:
    """What `work` gave for each share: things are dealt out so that shares are of about the same size, and keep their
    order. Raises what any of them raised, once all have ended."""
    shares: list[list[int]] = [[] for _ in range(count())]
    sizes = [0] * len(shares)
    listed = list(things)
    for number in sorted(range(len(listed)), key=lambda n: -size(listed[n])):
        least = sizes.index(min(sizes))
        shares[least].append(number)
        sizes[least] += size(listed[number])
    filled = [[listed[number] for number in sorted(share)] for share in shares if share]
    if len(filled) < 2:
        return map(work, filled)
    with ThreadPoolExecutor(len(filled)) as pool:
        return iter(list(pool.map(work, filled)))
