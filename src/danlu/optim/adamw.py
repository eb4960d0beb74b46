"""AdamW (Loshchilov and Hutter 2019): Adam with decoupled weight decay, by torch's fused kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from danlu.core.config import setting
from danlu.optim.groups import Group
from danlu.optim.schedule import Cosine, Schedule


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """w <- w - rate * (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay * w)."""

    kind: Literal["adamw"] = "adamw"
    learning_rate: float = setting(1e-3, "peak learning rate", at_least=0)
    weight_decay: float = setting(0.1, "decoupled decay; not on norms, biases and other 1-D weights", at_least=0)
    betas: tuple[float, float] = setting((0.9, 0.95), "decay of the first and second moment", at_least=0, below=1)
    eps: float = setting(1e-8, "added to the root of the second moment", above=0)
    max_grad_norm: float = setting(
        1.0, "global gradient norm that gradients are clipped to; 0: not clipped", at_least=0
    )
    schedule: Schedule = setting(Cosine(), "how the rate moves over the run")

    def over(self, groups: list[Group]) -> torch.optim.Optimizer:
        """torch's optimiser over these weights. Fused: one pass over each weight and its moments."""
        described = [
            {"params": list(group.parameters.values()), "weight_decay": group.weight_decay} for group in groups
        ]
        return torch.optim.AdamW(described, lr=self.learning_rate, betas=self.betas, eps=self.eps, fused=True)
