"""AdamW (Loshchilov and Hutter 2019): Adam with decoupled weight decay, by torch's fused kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from danlu.core.config import setting
from danlu.optim.common import Common, Kept, moments
from danlu.optim.groups import Group
from danlu.optim.own import Moving, Own


@dataclass(frozen=True, kw_only=True)
class AdamW(Common):
    """w <- w - rate * (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay * w)."""

    elementwise: ClassVar[bool] = True
    kind: Literal["adamw"] = "adamw"
    betas: tuple[float, float] = setting((0.9, 0.95), "decay of the first and second moment", at_least=0, below=1)
    eps: float = setting(1e-8, "added to the root of the second moment", above=0)

    def over(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        """The optimiser over these weights."""
        return Own(self, groups, self._move)

    def states(self, shape: Sequence[int], *, dtype: torch.dtype, role: str) -> dict[str, Kept]:
        """Two moments and a count."""
        return moments({"exp_avg": dtype, "exp_avg_sq": dtype}, shape)

    def _move(self, moving: Sequence[Moving], group: dict[str, Any]) -> None:
        move(moving, rate=group["lr"], decay=group["weight_decay"], betas=self.betas, eps=self.eps)


def move(moving: Sequence[Moving], *, rate: float, decay: float, betas: tuple[float, float], eps: float) -> None:
    """The weights have moved by AdamW, in one pass over each weight and its moments."""
    apply(
        [one.weight for one in moving],
        [one.gradient for one in moving],
        [one.state["exp_avg"] for one in moving],
        [one.state["exp_avg_sq"] for one in moving],
        [one.state["step"] for one in moving],
        rate=rate,
        decay=decay,
        betas=betas,
        eps=eps,
    )


def apply(
    weights: list[Tensor],
    gradients: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    steps: list[Tensor],
    *,
    rate: float,
    decay: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """torch's fused kernel over these tensors: moments, steps and weights are one update further."""
    adamw(
        weights,
        gradients,
        first,
        second,
        [],
        steps,
        fused=True,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=rate,
        weight_decay=decay,
        eps=eps,
        maximize=False,
    )
