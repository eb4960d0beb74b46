"""Rotary positions (RoFormer, arXiv:2104.09864), in the half-rotation layout of Hugging Face's Llama.

Phases are computed from the positions at each forward, so there is no table that a cast of the model could spoil.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Rotation = tuple[Tensor, Tensor]  # cosines and sines, [B, S, 1, head_dim / 2] each


def rotation(positions: Tensor, *, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    """Cosines and sines of positions [B, S] as [B, S, 1, head_dim / 2] in `dtype`, from phases in fp32 or better."""
    exact = torch.promote_types(dtype, torch.float32)
    steps = torch.arange(0, head_dim, 2, dtype=exact, device=positions.device)
    phases = positions[..., None, None].to(exact) * theta ** (-steps / head_dim)
    return phases.cos().to(dtype), phases.sin().to(dtype)


def rotate(heads: Tensor, turn: Rotation) -> Tensor:
    """Heads [B, S, H, head_dim] turned by their positions: the pairs are (i, i + head_dim / 2)."""
    if torch.compiler.is_compiling():  # the compiler fuses the plain formula
        cos, sin = turn
        first, second = heads.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    turned: Tensor = _Rotate.apply(heads, *turn)
    return turned


class _Rotate(torch.autograd.Function):
    """The rotation and its inverse, written in place: half the time of the formula in bf16 on CPU."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(heads, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(gradient, cos, sin, -1), None, None


def _turn(heads: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    turned = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    first, second = heads.chunk(2, -1)
    to_first, to_second = turned.chunk(2, -1)
    torch.mul(first, cos, out=to_first)
    to_first.addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=to_second)
    to_second.addcmul_(first, sin, value=sign)
    return turned
