"""AdamW with moments of 8 bits (Dettmers et al. 2022, arXiv:2110.02861): about 2 bytes a weight in place of 8.

Both moments are read from their codes, moved and used in full precision, and put back into codes. Small weights, norms
and biases keep full moments, and so do embeddings, as the paper found stabler.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from danlu.core.config import setting
from danlu.optim import adamw
from danlu.optim.blocks import columns, decode, encode
from danlu.optim.common import Common, Kept, at_least_fp32, moments
from danlu.optim.groups import Group
from danlu.optim.own import Moving, Own

SMALL = 4096  # numbers: a weight that has fewer keeps full moments
# Numbers moved at a time, which exist in full precision only meanwhile: few enough for a cache, and for memory that is
# not asked of the system anew each time.
AT_ONCE_CPU, AT_ONCE_ELSEWHERE = 1 << 16, 1 << 26


@dataclass(frozen=True, kw_only=True)
class AdamW8bit(Common):
    """AdamW, its moments of matrices kept as 8-bit codes with a scale for each block of up to 256 in a row."""

    kind: Literal["adamw8bit"] = "adamw8bit"
    betas: tuple[float, float] = setting((0.9, 0.95), "decay of the first and second moment", at_least=0, below=1)
    eps: float = setting(1e-8, "added to the root of the second moment", above=0)
    full_embedding: bool = setting(True, "embeddings keep moments of full precision")

    def over(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        """The optimiser over these weights."""
        return Own(self, groups, self._move)

    def states(self, shape: Sequence[int], *, dtype: torch.dtype, role: str) -> dict[str, Kept]:
        """Codes and scales of two moments, or two full moments; a count."""
        if len(shape) != 2 or math.prod(shape) < SMALL or (role == "embedding" and self.full_embedding):
            return moments({"exp_avg": dtype, "exp_avg_sq": dtype}, shape)
        codes = Kept(shape=tuple(shape), dtype=torch.uint8)
        scales = Kept(shape=(shape[0], columns(shape[1])), dtype=at_least_fp32(dtype))
        return {
            "exp_avg_codes": codes,
            "exp_avg_scales": scales,
            "exp_avg_sq_codes": codes,
            "exp_avg_sq_scales": scales,
            "step": Kept(shape=(), dtype=torch.float32),
        }

    def _move(self, moving: Sequence[Moving], group: dict[str, Any]) -> None:
        rate, decay = group["lr"], group["weight_decay"]
        full = [one for one in moving if "exp_avg" in one.state]
        if full:
            adamw.move(full, rate=rate, decay=decay, betas=self.betas, eps=self.eps)
        for one in moving:
            if "exp_avg_codes" in one.state:
                self._move_coded(one, rate=rate, decay=decay)

    def _move_coded(self, one: Moving, *, rate: float, decay: float) -> None:
        state = one.state
        at_once = AT_ONCE_CPU if one.weight.device.type == "cpu" else AT_ONCE_ELSEWHERE
        rows = max(1, at_once // one.weight.shape[1])
        for start in range(0, one.weight.shape[0], rows):
            some = slice(start, start + rows)
            coded = {kind: value[some] for kind, value in state.items() if value.dim()}
            first = decode(coded["exp_avg_codes"], coded["exp_avg_scales"], signed=True)
            second = decode(coded["exp_avg_sq_codes"], coded["exp_avg_sq_scales"], signed=False)
            adamw.apply(
                [one.weight[some]],
                [one.gradient[some]],
                [first],
                [second],
                [state["step"].clone()],
                rate=rate,
                decay=decay,
                betas=self.betas,
                eps=self.eps,
            )
            encode(first, coded["exp_avg_codes"], coded["exp_avg_scales"], signed=True)
            encode(second, coded["exp_avg_sq_codes"], coded["exp_avg_sq_scales"], signed=False)
        state["step"].add_(1)
