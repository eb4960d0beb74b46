"""Settings of the memory layer, and how many rows fit in one forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from danlu.core.config import setting
from danlu.memory.precision import Name, Roles
from danlu.memory.recompute import Recompute
from danlu.memory.scale import LossScale

Part = Literal["weights", "gradients", "optimizer", "activations"]
TOGETHER = ("weights", "gradients", "optimizer")  # FSDP2 keeps these three in one place


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
    offload: list[Part] = setting(
        [], "what is kept off the device: weights and gradients (with optimizer), optimizer (its states), activations"
    )
    offload_folder: str | None = setting(
        None, "a folder on a fast disk, where optimizer states lie in a file; null: in the host's memory"
    )


def mistakes(parts: Sequence[str], folder: str | None) -> Iterator[tuple[str, str]]:
    """What is wrong with the settings on any device: field, and what would do."""
    missing = [part for part in TOGETHER if part not in parts]
    if missing and ("weights" in parts or "gradients" in parts):
        yield (
            "memory.offload",
            f"weights and gradients leave the device together, and their optimizer states with them; add "
            f"{' and '.join(missing)}, or keep only optimizer and activations",
        )
    if folder is not None and "optimizer" not in parts:
        yield (
            "memory.offload_folder",
            "is for optimizer states, which stay where they are; add optimizer to memory.offload, or set it to null",
        )


ROOM = 0.8  # share of the free memory that may be planned with: allocators and libraries want the rest


def rows_that_fit(needs: Callable[[int], int], *, rows: int, free_bytes: int) -> int:
    """The largest divisor of `rows` whose micro-batch needs no more than what is free; 1 where not even that does.

    A divisor, so that every micro-batch of an update is alike. needs: bytes for so many rows in a forward.
    """
    divisors = (size for size in range(rows, 0, -1) if rows % size == 0)
    return next((size for size in divisors if needs(size) <= free_bytes), 1)
