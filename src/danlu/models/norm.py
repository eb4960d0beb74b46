"""RMSNorm (arXiv:1910.07467) and LayerNorm (arXiv:1607.06450), computed in fp32 or better."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Norm(nn.Module):
    """Normalises the last dim, then scales it; "layer" also centres and shifts.

    Gives the dtype that the next matrix product wants: autocast's where it is on, else the input's.
    """

    def __init__(self, size: int, *, kind: Literal["rms", "layer"], eps: float) -> None:
        super().__init__()
        self.kind, self.eps = kind, eps
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if kind == "layer" else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., D], normalised."""
        wanted = working_dtype(hidden)
        exact = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        weight = self.weight.to(exact.dtype)
        if self.bias is not None:
            return F.layer_norm(exact, weight.shape, weight, self.bias.to(exact.dtype), self.eps).to(wanted)
        if type(exact) is Tensor and exact.device.type == "cpu" and not torch.compiler.is_compiling():
            normed: Tensor = _RootMeanSquare.apply(exact, weight, self.eps, wanted)
            return normed
        return F.rms_norm(exact, weight.shape, weight, self.eps).to(wanted)


def working_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype that matrix products of these states run in: autocast's where it is on, else their own."""
    kind = hidden.device.type
    if hidden.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return hidden.dtype


class _RootMeanSquare(torch.autograd.Function):
    """RMSNorm on CPU, a third of the time of torch's: its backward goes through LayerNorm's fused kernel.

    With a mean of zero, LayerNorm's gradient is RMSNorm's less the part that centring takes away, which is put back.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        square = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True).square_()
        scale = square.div_(hidden.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(hidden, weight, scale)
        return (hidden * scale).mul_(weight).to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight, scale = ctx.saved_tensors
        size = hidden.shape[-1]
        gradient = gradient.to(hidden.dtype).contiguous()
        back, by_weight, _ = torch.ops.aten.native_layer_norm_backward(
            gradient, hidden, [size], torch.zeros_like(scale), scale, weight, None, [True, True, False]
        )
        centre = torch.mv(gradient.view(-1, size), weight).div_(size).view(scale.shape)
        return back.addcmul_(centre, scale), by_weight, None, None
