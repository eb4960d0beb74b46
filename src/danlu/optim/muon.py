"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv:2502.16982): momentum of
a matrix, made orthogonal by Newton and Schulz's iteration. Matrices of blocks only; AdamW moves the rest.

The iteration needs whole matrices. Where weights are cut over ranks, each rank is given all rows of some matrices,
makes those orthogonal, and gives the rows back; where weights are copied, the copies share the matrices too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from danlu.core.config import setting
from danlu.optim import adamw
from danlu.optim.common import Common, Kept, moments
from danlu.optim.groups import Group
from danlu.optim.own import Moving, Own
from danlu.optim.sharing import Exchange

QUINTIC = (3.4445, -4.7750, 2.0315)  # steep at zero; brings singular values to about 1 in five iterations
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Muon(Common):
    """m <- momentum * m + (1 - momentum) * g; w <- w - rate * (scale * orthogonal(m) + weight_decay * w)."""

    kind: Literal["muon"] = "muon"
    learning_rate: float = setting(0.02, "peak learning rate of the blocks' matrices", at_least=0)
    adamw_learning_rate: float = setting(1e-3, "peak learning rate of embeddings, heads, norms and biases", at_least=0)
    momentum: float = setting(0.95, "decay of the momentum of matrices", at_least=0, below=1)
    nesterov: bool = setting(True, "look ahead by the momentum")
    ns_steps: int = setting(5, "iterations that make a matrix orthogonal", at_least=1, at_most=99)
    ns_precision: Literal["bf16", "fp32"] = setting(
        "bf16", "of these iterations; fp32 where a device does not multiply bf16 fast; fp64 weights take fp64"
    )
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = setting(
        "original", "scale: sqrt(max(1, rows / columns)); or 0.2 sqrt(max(rows, columns)), so that AdamW's rates serve"
    )
    betas: tuple[float, float] = setting(
        (0.9, 0.95), "AdamW's decay of both moments, for the rest", at_least=0, below=1
    )
    eps: float = setting(1e-8, "AdamW's, added to the root of the second moment", above=0)

    def over(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        """The optimiser over these weights."""
        return Own(self, groups, self._move)

    def peak(self, group: Group) -> float:
        """The rate of matrices, or of the rest."""
        return self.learning_rate if group.role == "matrix" else self.adamw_learning_rate

    def states(self, shape: Sequence[int], *, dtype: torch.dtype, role: str) -> dict[str, Kept]:
        """A momentum of matrices; two moments and a count of the rest."""
        if role == "matrix":
            return {"momentum_buffer": Kept(shape=tuple(shape), dtype=dtype)}
        return moments({"exp_avg": dtype, "exp_avg_sq": dtype}, shape)

    def scale(self, rows: int, columns: int) -> float:
        """What the orthogonal matrix is multiplied by."""
        if self.adjust_lr_fn == "original":
            return math.sqrt(max(1.0, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))

    def _move(self, moving: Sequence[Moving], group: dict[str, Any]) -> None:
        rate, decay = group["lr"], group["weight_decay"]
        if group["role"] != "matrix":
            adamw.move(moving, rate=rate, decay=decay, betas=self.betas, eps=self.eps)
            return
        for one, orthogonal in self._orthogonal(moving):
            if decay:
                one.weight.mul_(1 - rate * decay)
            rows, columns = one.whole.shape
            one.weight.add_(orthogonal, alpha=-rate * self.scale(rows, columns))

    def _orthogonal(self, moving: Sequence[Moving]) -> Iterator[tuple[Moving, Tensor]]:
        """Each weight with this rank's rows of its orthogonal momentum.

        Largest first, as many at a time as there are ranks, so that those of one turn are alike.
        """
        exchange = Exchange(moving[0].whole)
        ordered = sorted(moving, key=lambda one: one.whole.numel(), reverse=True)
        for start in range(0, len(ordered), exchange.ranks):
            turn = ordered[start : start + exchange.ranks]
            parts = [self._momentum(one) for one in turn]
            wholes = [one.whole.shape for one in turn]
            yield from zip(turn, exchange.each(parts, wholes, lambda whole: orthogonal(whole, steps=self.ns_steps)))

    def _momentum(self, one: Moving) -> Tensor:
        """The momentum after this gradient, in the precision of the iteration."""
        momentum = one.state["momentum_buffer"].lerp_(one.gradient, 1 - self.momentum)
        ahead = one.gradient.lerp(momentum, self.momentum) if self.nesterov else momentum
        return ahead if ahead.dtype == torch.float64 else ahead.to(DTYPES[self.ns_precision])


def orthogonal(matrix: Tensor, *, steps: int) -> Tensor:
    """About U V^T of the matrix U S V^T, with singular values between about 0.7 and 1.2, in the matrix's dtype."""
    a, b, c = QUINTIC
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=1e-7)  # no singular value is above 1 then
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
