"""What every optimiser is told, and what each says of the state that it keeps."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from danlu.core.config import setting
from danlu.optim.average import KIND, Average
from danlu.optim.groups import Group, Rate, twice
from danlu.optim.schedule import Cosine, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One tensor that an optimiser keeps of one weight.

    Each of its dims that is as long as the weight's is cut over ranks as the weight's is; what is `whole` is held by
    every rank, as are single numbers. What is on the `host` does not follow the weight to its device.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    whole: bool = False
    host: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of it, over all ranks that hold a part."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Common(ABC):
    """What all optimisers share.

    elementwise: each number of a weight moves by itself, whatever its shape, so that a weight may be moved in slices.
    """

    elementwise: ClassVar[bool] = False
    kind: str = ""
    learning_rate: float = setting(1e-3, "peak learning rate", at_least=0)
    weight_decay: float = setting(0.1, "decoupled decay; not on norms, biases and other 1-D weights", at_least=0)
    max_grad_norm: float = setting(
        1.0, "global gradient norm that gradients are clipped to; 0: not clipped", at_least=0
    )
    max_grad_value: float | None = setting(
        None, "what no number of a gradient is beyond, after the norm was clipped; null: not clipped", above=0
    )
    schedule: Schedule = setting(Cosine(), "how the rate moves over the run")
    average: Average | None = setting(None, "a moving average of the weights, kept beside them; null: none")
    rates: list[Rate] = setting([], "rates of single roles (and widths: muP) against learning_rate")

    def __post_init__(self) -> None:
        if (role := twice(self.rates)) is not None:
            raise ValueError(f"rates: {role} stands there twice; keep one")

    @abstractmethod
    def over(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        """What moves these weights; each of its groups has the rate of an update set before it."""

    @abstractmethod
    def states(self, shape: Sequence[int], *, dtype: torch.dtype, role: str) -> dict[str, Kept]:
        """What is kept, by kind, of a weight of this whole shape, dtype and role once it has moved."""

    def kept(self, shape: Sequence[int], *, dtype: torch.dtype, role: str) -> dict[str, Kept]:
        """All that is kept of such a weight, by kind: the optimiser's states, and the average where there is one."""
        kept = self.states(shape, dtype=dtype, role=role)
        return kept if self.average is None else kept | {KIND: Kept(shape=tuple(shape), dtype=at_least_fp32(dtype))}

    def state_bytes(self, shape: Sequence[int], *, dtype: torch.dtype = torch.float32, role: str = "matrix") -> int:
        """Bytes of the states of one weight, over all ranks that hold a part of it."""
        return sum(kept.bytes for kept in self.states(shape, dtype=dtype, role=role).values())

    def peak(self, group: Group) -> float:
        """The peak rate of a group's weights, before what `rates` says of their role."""
        return self.learning_rate

    def described(self, groups: Sequence[Group]) -> list[dict[str, Any]]:
        """The groups as torch's optimisers take them, each with its peak rate and its role."""
        return [
            {
                "params": list(group.parameters.values()),
                "weight_decay": group.weight_decay,
                "peak": self.peak(group) * group.rate,
                "role": group.role,
            }
            for group in groups
        ]


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """fp32, or what is finer."""
    return torch.promote_types(dtype, torch.float32)


def moments(kinds: Mapping[str, torch.dtype], shape: Sequence[int]) -> dict[str, Kept]:
    """Kept tensors of the weight's own shape, and the count of its updates."""
    kept = {kind: Kept(shape=tuple(shape), dtype=dtype) for kind, dtype in kinds.items()}
    return kept | {"step": Kept(shape=(), dtype=torch.float32)}
