"""AdamW (Loshchilov and Hutter 2019): Adam with decoupled weight decay, by torch's fused kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from danlu.core.config import setting
from danlu.optim.common import Common, Kept, moments
from danlu.optim.groups import Group


@dataclass(frozen=True, kw_only=True)
class AdamW(Common):
    """w <- w - rate * (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay * w)."""

    kind: Literal["adamw"] = "adamw"
    betas: tuple[float, float] = setting((0.9, 0.95), "decay of the first and second moment", at_least=0, below=1)
    eps: float = setting(1e-8, "added to the root of the second moment", above=0)

    def over(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        """torch's optimiser over these weights. Fused: one pass over each weight and its moments."""
        return torch.optim.AdamW(
            self.described(groups), lr=self.learning_rate, betas=self.betas, eps=self.eps, fused=True
        )

    def states(self, shape: Sequence[int], *, dtype: torch.dtype, role: str) -> dict[str, Kept]:
        """Two moments and a count."""
        return moments({"exp_avg": dtype, "exp_avg_sq": dtype}, shape)
