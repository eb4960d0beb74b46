"""The feed-forward part: gated (SwiGLU, arXiv:2002.05202) or plain."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from danlu.models.attention import together
from danlu.models.product import Linear
from danlu.models.shape import Activation, Shape


class Mlp(nn.Module):
    """down(act(gate(x)) * up(x)) if gated, else down(act(up(x)))."""

    roles: ClassVar[dict[str, str]] = {"gate": "column", "up": "column", "down": "row"}

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        size, inner, bias = shape.hidden_size, shape.inner_size, shape.mlp_bias
        self.activation: Activation = shape.activation
        self.gate = Linear(size, inner, bias=bias) if shape.gated else None
        self.up = Linear(size, inner, bias=bias)
        self.down = Linear(inner, size, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states [B, S, D] to the same shape."""
        if self.gate is None:
            return self.down(activate(self.up(hidden), self.activation))
        gate, up = together(hidden, self.gate, self.up)
        return self.down(activate(gate, self.activation) * up)


def activate(inner: Tensor, kind: Activation) -> Tensor:
    """The activation of that name: "gelu" is exact, "gelu_tanh" its approximation (GPT-2's gelu_new)."""
    match kind:
        case "silu":
            return F.silu(inner)
        case "gelu":
            return F.gelu(inner)
        case "gelu_tanh":
            return F.gelu(inner, approximate="tanh")
        case "relu":
            return F.relu(inner)
