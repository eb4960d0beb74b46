"""Settings of the memory layer, and how many rows fit in one forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from danlu.core.config import setting
from danlu.memory.precision import Name, Roles
from danlu.memory.recompute import Recompute
from danlu.memory.scale import LossScale


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What is kept, where, and how precisely."""

    precision: Name = setting(
        "auto", "fp32 | bf16, fp16, fp8: products, weights stay fp32 | bf16_pure: weights too | fp64: for proofs | auto"
    )
    roles: Roles = setting(Roles(), "parts of the model that compute in something else: {head: fp32, mlp: fp8}")
    loss_scale: LossScale = setting(LossScale(), "what fp16's loss is multiplied by, and how that moves")
    recompute: Recompute = setting(
        "none",
        "what the backward computes again: none | selective: all but products and attention | full | {budget: …}",
    )
    offload: list[str] = setting([], "what is kept on the host: nothing yet")


ROOM = 0.8  # share of the free memory that may be planned with: allocators and libraries want the rest


def rows_that_fit(needs: Callable[[int], int], *, rows: int, free_bytes: int) -> int:
    """The largest divisor of `rows` whose micro-batch needs no more than what is free; 1 where not even that does.

    A divisor, so that every micro-batch of an update is alike. needs: bytes for so many rows in a forward.
    """
    divisors = (size for size in range(rows, 0, -1) if rows % size == 0)
    return next((size for size in divisors if needs(size) <= free_bytes), 1)
