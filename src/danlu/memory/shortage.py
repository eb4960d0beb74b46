"""Memory has run out: how that is known, and what is said of it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from danlu.core import words
from danlu.memory.ledger import Ledger

# What a RuntimeError says when an allocator was refused: torch's on a CPU, the C++ library's, cuBLAS's.
WORDS = ("can't allocate memory", "not enough memory", "bad_alloc", "out of memory", "ALLOC_FAILED")


def ran_out(error: BaseException) -> bool:
    """Whether memory could not be had, on the device or on the host."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in WORDS)


def sentence(where: str, ledger: Ledger, *, free: int, remedies: Iterable[str]) -> str:
    """What ran out, what the run was thought to need by part, and what would need less."""
    parts = sorted(((size, part) for part, size in ledger.parts.items() if size), reverse=True)
    told = ", ".join(f"{part} {words.size(size)}" for size, part in parts)
    would = list(remedies)
    return (
        f"out of memory{f' {where}' if where else ''}: about {words.size(ledger.peak)} of tensors were forecast "
        f"({told}), and {words.size(free)} were free when the run began"
        + (f"; less would be needed with {', or '.join(would)}" if would else "")
    )
