"""Adafactor (Shazeer and Stern 2018, arXiv:1804.04235, algorithms 4 to 6): the second moment of a matrix as a row and a
column, updates clipped by their root mean square.

The rate is given (relative_step: the paper's min(rate, 1 / sqrt(t))). Sums over rows and columns are kept as means,
which is the same update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from danlu.core.config import setting
from danlu.optim.common import Common, Kept, at_least_fp32
from danlu.optim.groups import Group
from danlu.optim.own import Moving, Own, portions, total


@dataclass(frozen=True, kw_only=True)
class Adafactor(Common):
    """V = r c / mean(r); u = g / sqrt(V); w <- w - rate * max(eps2, rms(w)) * u / max(1, rms(u) / clip_threshold)."""

    kind: Literal["adafactor"] = "adafactor"
    learning_rate: float = setting(
        1e-2, "peak learning rate; with scale_parameter relative to a weight's size", at_least=0
    )
    weight_decay: float = setting(0.0, "decoupled decay; not on norms, biases and other 1-D weights", at_least=0)
    decay_rate: float = setting(0.8, "the second moment decays by 1 - t^-decay_rate at update t", above=0, at_most=1)
    clip_threshold: float = setting(1.0, "largest root mean square of an update before the rate", above=0)
    eps: tuple[float, float] = setting(
        (1e-30, 1e-3), "added to squared gradients, and the smallest size a weight is taken to have", at_least=0
    )
    scale_parameter: bool = setting(True, "the rate is times the root mean square of the weight")
    relative_step: bool = setting(False, "the rate is at most 1 / sqrt(t) at update t")

    def over(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        """The optimiser over these weights."""
        return Own(self, groups, self._move)

    def states(self, shape: Sequence[int], *, dtype: torch.dtype, role: str) -> dict[str, Kept]:
        """A mean for each row and each column of a matrix; all second moments of other weights; a count."""
        count = {"step": Kept(shape=(), dtype=torch.float32, host=True)}
        if len(shape) != 2:
            return {"variance": Kept(shape=tuple(shape), dtype=dtype), **count}
        rows, columns = shape
        row = Kept(shape=(rows, 1), dtype=at_least_fp32(dtype))
        return {"row_var": row, "col_var": Kept(shape=(1, columns), dtype=row.dtype, whole=True), **count}

    def _move(self, moving: Sequence[Moving], group: dict[str, Any]) -> None:
        for some in portions(moving):
            torch._foreach_add_([one.state["step"] for one in some], 1.0)
            matrices = some[0].weight.dim() == 2
            ages = [one.state["step"].item() for one in some]  # on the host: nothing is waited for
            sizes, updates = self._factored(some, ages) if matrices else self._plain(some, ages)
            squares = _squares(updates)
            norms = total(squares, [one.whole for one in some])
            if group["weight_decay"]:
                torch._foreach_mul_([one.weight for one in some], 1 - group["lr"] * group["weight_decay"])
            for one, age, size, update, norm in zip(some, ages, sizes, updates, norms):
                rate = min(group["lr"], age**-0.5) if self.relative_step else group["lr"]
                count = one.whole.numel()
                shrink = ((norm / count).sqrt() / self.clip_threshold).clamp(min=1.0)
                scale = (size / count).sqrt().clamp(min=self.eps[1]) if self.scale_parameter else 1.0
                one.weight.add_(update.mul_(-rate * scale / shrink))

    def _factored(self, moving: Sequence[Moving], ages: Sequence[float]) -> tuple[list[Tensor], list[Tensor]]:
        """Of matrices: the sum of squares of each whole weight, and the update before clipping."""
        wanted: list[Tensor] = []
        for one, age in zip(moving, ages):
            squares = one.gradient.square()
            row = one.state["row_var"].lerp_(squares.mean(-1, keepdim=True).add_(self.eps[0]), age**-self.decay_rate)
            wanted.append(
                torch.cat([squares.sum(-2).reshape(-1), row.sum().reshape(1), one.weight.square().sum().reshape(1)])
            )
        found = total(wanted, [one.whole for one in moving])
        updates = []
        for one, age, sums in zip(moving, ages, found):
            rows, state = one.whole.shape[-2], one.state
            columns = sums[:-2].view_as(state["col_var"]) / rows
            state["col_var"].lerp_(columns.add_(self.eps[0]), age**-self.decay_rate)
            mean = sums[-2] / rows
            roots = (state["row_var"] / mean).rsqrt_() * state["col_var"].rsqrt()
            updates.append(roots.mul_(one.gradient))
        return [sums[-1] for sums in found], updates

    def _plain(self, moving: Sequence[Moving], ages: Sequence[float]) -> tuple[list[Tensor], list[Tensor]]:
        """Of other weights: the same."""
        updates = []
        for one, age in zip(moving, ages):
            variance = one.state["variance"]
            variance.lerp_(one.gradient.square().add_(self.eps[0]), age**-self.decay_rate)
            updates.append(variance.rsqrt().mul_(one.gradient))
        return total(_squares([one.weight for one in moving]), [one.whole for one in moving]), updates


def _squares(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [norm.square() for norm in torch._foreach_norm(list(tensors), 2)]
