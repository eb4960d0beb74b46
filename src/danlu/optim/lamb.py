"""LAMB (You et al. 2020, arXiv:1904.00962, algorithm 2): Adam's update, each weight's scaled to the weight's own norm.

Moments are corrected for their zero start, as in the algorithm (its appendix says that warm-up can stand for it). The
scaling function is the identity. Norms, biases and other 1-D weights are neither decayed nor scaled, as in the authors'
training of BERT.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from danlu.core.config import setting
from danlu.optim import adamw
from danlu.optim.common import Common, Kept, moments
from danlu.optim.groups import Group
from danlu.optim.own import Moving, Own, portions, total


@dataclass(frozen=True, kw_only=True)
class Lamb(Common):
    """u = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay * w; w <- w - rate * |w| / |u| * u."""

    kind: Literal["lamb"] = "lamb"
    learning_rate: float = setting(2e-3, "peak learning rate: the share of its norm that a weight moves", at_least=0)
    weight_decay: float = setting(0.01, "decoupled decay; not on norms, biases and other 1-D weights", at_least=0)
    betas: tuple[float, float] = setting((0.9, 0.999), "decay of the first and second moment", at_least=0, below=1)
    eps: float = setting(1e-6, "added to the root of the second moment", above=0)
    max_trust_ratio: float = setting(0.0, "largest |w| / |u| that is used; 0: not bounded", at_least=0)

    def over(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        """The optimiser over these weights."""
        return Own(self, groups, self._move)

    def states(self, shape: Sequence[int], *, dtype: torch.dtype, role: str) -> dict[str, Kept]:
        """Two moments and a count."""
        return moments({"exp_avg": dtype, "exp_avg_sq": dtype}, shape)

    def _move(self, moving: Sequence[Moving], group: dict[str, Any]) -> None:
        for some in portions(moving):
            weights = [one.weight for one in some]
            # The fused kernel of AdamW at rate 1 on a weight of zero leaves Adam's update there, its sign turned.
            updates = [torch.zeros_like(weight) for weight in weights]
            adamw.apply(
                updates,
                [one.gradient for one in some],
                [one.state["exp_avg"] for one in some],
                [one.state["exp_avg_sq"] for one in some],
                [one.state["step"] for one in some],
                rate=1.0,
                decay=0.0,
                betas=self.betas,
                eps=self.eps,
            )
            if group["weight_decay"]:
                torch._foreach_add_(updates, weights, alpha=-group["weight_decay"])
            if weights[0].dim() < 2:
                torch._foreach_add_(weights, updates, alpha=group["lr"])
                continue
            for weight, update, trust in zip(weights, updates, self._trust(updates, some)):
                weight.addcmul_(
                    update, trust, value=group["lr"]
                )  # the ratio stays on its device: nothing is waited for

    def _trust(self, updates: list[Tensor], moving: Sequence[Moving]) -> list[Tensor]:
        """|w| / |u| of each whole weight; 1 where either is zero."""
        both = torch._foreach_norm([*(one.weight for one in moving), *updates], 2)
        squares = torch.stack(both).view(2, -1).square()
        found = total(list(squares.T), [one.whole for one in moving])
        weight, update = torch.stack(found).sqrt().T
        ratio = torch.where((weight > 0) & (update > 0), weight / update, torch.ones_like(weight))
        if self.max_trust_ratio:
            ratio = ratio.clamp(max=self.max_trust_ratio)
        return list(ratio.unbind())
