"""Stochastic gradient descent with momentum, as torch defines it, by torch's fused kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch.optim.sgd import sgd

from danlu.core.config import setting
from danlu.optim.common import Common, Kept
from danlu.optim.groups import Group
from danlu.optim.own import Moving, Own


@dataclass(frozen=True, kw_only=True)
class Sgd(Common):
    """d = g + weight_decay * w; m <- momentum * m + d; w <- w - rate * (nesterov ? d + momentum * m : m)."""

    elementwise: ClassVar[bool] = True
    kind: Literal["sgd"] = "sgd"
    learning_rate: float = setting(0.1, "peak learning rate", at_least=0)
    weight_decay: float = setting(
        0.0, "added to the gradient (L2, not decoupled); not on norms, biases and other 1-D weights", at_least=0
    )
    momentum: float = setting(
        0.9, "decay of the sum of gradients; 0: the gradient alone, and no state", at_least=0, below=1
    )
    nesterov: bool = setting(False, "look ahead by the momentum (Nesterov 1983, as in Sutskever et al. 2013)")

    def over(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        """The optimiser over these weights."""
        return Own(self, groups, self._move)

    def states(self, shape: Sequence[int], *, dtype: torch.dtype, role: str) -> dict[str, Kept]:
        """The momentum, where there is one."""
        return {"momentum_buffer": Kept(shape=tuple(shape), dtype=dtype)} if self.momentum else {}

    def _move(self, moving: Sequence[Moving], group: dict[str, Any]) -> None:
        sgd(
            [one.weight for one in moving],
            [one.gradient for one in moving],
            [one.state.get("momentum_buffer") for one in moving],
            fused=True,
            weight_decay=group["weight_decay"],
            momentum=self.momentum,
            lr=group["lr"],
            dampening=0.0,
            nesterov=self.nesterov and self.momentum > 0,
            maximize=False,
        )
