"""The product of hidden states and a weight, by the fastest kernel that the machine has for it.

torch multiplies fp32 on a CPU by MKL, which is slow on processors that are not Intel's; oneDNN, which it carries too,
is not. On two cores of an EPYC the forward and the gradient of the states took 0.75 to 0.9 of MKL's time by oneDNN, the
gradient of the weight more, so that MKL keeps that one (LOG.md).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 256  # with fewer, as when one token is generated, what a call costs outweighs what it saves


def _faster() -> bool:
    """Whether it is oneDNN that is faster here: the processor is AMD's, and torch has both libraries."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()):
        return False
    try:
        with open("/proc/cpuinfo") as file:
            return "AuthenticAMD" in file.read(4096)
    except OSError:
        return False


ONEDNN = _faster()


class Linear(nn.Linear):
    """A linear part whose product is `product`."""

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., in] to [..., out]."""
        return product(hidden, self.weight, self.bias)


def product(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """hidden [..., in] · weightᵀ [out, in] + bias."""
    if torch.is_autocast_enabled("cpu") or not faster(hidden, weight):
        return F.linear(hidden, weight, bias)
    made: Tensor = OPERATOR(hidden.reshape(-1, hidden.shape[-1]), weight, bias)
    return made.view(*hidden.shape[:-1], -1)


def faster(hidden: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN's is the faster product of these."""
    return ONEDNN and _exact_on_cpu(hidden) and _exact_on_cpu(weight) and hidden.numel() >= ROWS * hidden.shape[-1]


def _exact_on_cpu(part: Tensor) -> bool:
    return type(part) in (Tensor, nn.Parameter) and part.is_cpu and part.dtype == torch.float32


def multiply(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """hidden [n, in] · weightᵀ [out, in] + bias by oneDNN, without a gradient."""
    made: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, weight, bias, "none", [], "")
    return made


def _shape(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return hidden.new_empty(hidden.shape[0], weight.shape[0])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    hidden, weight, bias = inputs
    ctx.save_for_backward(hidden, weight)
    ctx.with_bias = bias is not None


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    hidden, weight = ctx.saved_tensors
    by_hidden = OPERATOR(gradient, weight.t(), None) if ctx.needs_input_grad[0] else None
    by_weight = torch.mm(gradient.t(), hidden) if ctx.needs_input_grad[1] else None
    return by_hidden, by_weight, gradient.sum(0) if ctx.with_bias and ctx.needs_input_grad[2] else None


# An operator of its own, since the compiler would want oneDNN's weights to be constants. Made by hand: the decorator
# that makes one imports the compiler at the first call, which takes a second.
_LIBRARY = torch.library.Library("danlu", "FRAGMENT")
_LIBRARY.define("product(Tensor hidden, Tensor weight, Tensor? bias) -> Tensor")
_LIBRARY.impl("product", lambda hidden, weight, bias: multiply(hidden, weight, bias), "CPU")
torch.library.register_fake("danlu::product", _shape, lib=_LIBRARY)
torch.library.register_autograd("danlu::product", _backward, setup_context=_keep, lib=_LIBRARY)
OPERATOR = torch.ops.danlu.product.default
