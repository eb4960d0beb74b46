"""Linear products in fp8: numbers of eight bits with one scale a tensor, found anew at each product.

Forward in e4m3, whose numbers are finer; gradients in e5m2, whose range is wider (Micikevicius et al. 2022,
arXiv:2209.05433, section 3). Sums are kept in fp32, and results given in the dtype that is worked in.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from danlu.models.norm import working_dtype

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # what every inner size of a product must be a multiple of


class Float8Linear(nn.Linear):
    """A linear part whose three products (forward, and the two gradients) are made in fp8; its weight stays as it is
    stored. Both of its sizes are multiples of 16.
    """

    @classmethod
    def of(cls, part: nn.Linear) -> Float8Linear:
        """The same part, with the very same weight and bias."""
        with torch.device("meta"):
            made = cls(part.in_features, part.out_features, bias=part.bias is not None)
        made.weight, made.bias = part.weight, part.bias
        return made

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., in] to [..., out]."""
        return linear(hidden, self.weight, self.bias)


def fits(part: nn.Linear) -> bool:
    """Whether its sizes can be multiplied in fp8."""
    return part.in_features % MULTIPLE == 0 and part.out_features % MULTIPLE == 0


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """hidden [..., in] · weightᵀ [out, in] + bias, in the dtype that is worked in, made in fp8."""
    dtype = working_dtype(hidden)
    made: Tensor = _Product.apply(hidden.reshape(-1, hidden.shape[-1]), weight, dtype)
    made = made.view(*hidden.shape[:-1], -1)
    return made if bias is None else made + bias.to(dtype)


def quantise(exact: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The tensor in fp8, and the scale (0-d, fp32) by which that is to be multiplied to be it again.

    The largest number becomes the largest of fp8. One that is not finite makes the scale, and so every product, not
    finite.
    """
    most = torch.finfo(dtype).max
    largest = exact.abs().amax().float()
    scale = (largest / most).clamp_(min=torch.finfo(torch.float32).tiny)
    return (exact.float() / scale).clamp_(-most, most).to(dtype), scale


def multiply(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], dtype: torch.dtype, *, fast: bool) -> Tensor:
    """left [m, k] · rightᵀ [n, k], both in fp8 with their scales and stored by rows: [m, n].

    fast: sums may be kept in fewer bits than fp32's, where the device has such units.
    """
    (a, of_a), (b, of_b) = left, right
    fast = fast and a.is_cuda
    with torch.autocast(a.device.type, enabled=False):  # a CPU's kernel is made of products that it would lower
        return torch._scaled_mm(a, b.t(), scale_a=of_a, scale_b=of_b, out_dtype=dtype, use_fast_accum=fast)


class _Product(torch.autograd.Function):
    """hidden [n, in] · weightᵀ. Kept for the backward: hidden in fp8, and the weight as it is."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        low = quantise(hidden, FORWARD)
        ctx.save_for_backward(*low, weight)
        ctx.given = hidden.dtype
        return multiply(low, quantise(weight, FORWARD), dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, scale, weight = ctx.saved_tensors
        low, of = quantise(gradient, BACKWARD)
        by_hidden = by_weight = None
        if ctx.needs_input_grad[0]:
            values, its = quantise(weight, FORWARD)
            by_hidden = multiply((low, of), (_turned(values), its), gradient.dtype, fast=False).to(ctx.given)
        if ctx.needs_input_grad[1]:
            more = -len(low) % MULTIPLE  # rows of nothing, so that the inner size fits
            rows, columns = _turned(_longer(low, more)), _turned(_longer(hidden, more))
            by_weight = multiply((rows, of), (columns, scale), torch.float32, fast=False).to(weight.dtype)
        return by_hidden, by_weight, None


def _turned(matrix: Tensor) -> Tensor:
    """The transposed matrix, stored by rows."""
    return matrix.t().contiguous()


def _longer(matrix: Tensor, rows: int) -> Tensor:
    """The matrix with so many rows of zeros below it."""
    return matrix if not rows else F.pad(matrix.view(torch.uint8), (0, 0, 0, rows)).view(matrix.dtype)
