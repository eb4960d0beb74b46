"""Lion (Chen et al. 2023, arXiv:2302.06675, algorithm 2): the sign of an interpolated momentum, with decoupled decay.

Its updates are larger than AdamW's: a rate 3 to 10 times smaller and a decay as much larger serve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from danlu.core.config import setting
from danlu.optim.common import Common, Kept
from danlu.optim.groups import Group
from danlu.optim.own import Moving, Own, portions, slices


@dataclass(frozen=True, kw_only=True)
class Lion(Common):
    """w <- w - rate * (sign(b1 m + (1 - b1) g) + weight_decay * w); m <- b2 m + (1 - b2) g."""

    elementwise: ClassVar[bool] = True
    kind: Literal["lion"] = "lion"
    learning_rate: float = setting(1e-4, "peak learning rate: 3 to 10 times smaller than AdamW's", at_least=0)
    weight_decay: float = setting(1.0, "decoupled decay; not on norms, biases and other 1-D weights", at_least=0)
    betas: tuple[float, float] = setting(
        (0.9, 0.99), "share of the old momentum in an update, and in the new momentum", at_least=0, below=1
    )

    def over(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        """The optimiser over these weights."""
        return Own(self, groups, self._move)

    def states(self, shape: Sequence[int], *, dtype: torch.dtype, role: str) -> dict[str, Kept]:
        """One moment."""
        return {"exp_avg": Kept(shape=tuple(shape), dtype=dtype)}

    def _move(self, moving: Sequence[Moving], group: dict[str, Any]) -> None:
        for some in portions(slices(moving)):
            weights, gradients = [one.weight for one in some], [one.gradient for one in some]
            momentum = [one.state["exp_avg"] for one in some]
            directions = torch._foreach_lerp(momentum, gradients, 1 - self.betas[0])
            torch._foreach_sign_(directions)
            if group["weight_decay"]:
                torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(weights, directions, alpha=-group["lr"])
            torch._foreach_lerp_(momentum, gradients, 1 - self.betas[1])
