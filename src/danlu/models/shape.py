"""What a decoder is made of: sizes and kinds of parts, free of any family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A pre-norm decoder, in the terms that its parts are built from.

    norm       "rms" (a weight) or "layer" (a weight and a bias), with its eps
    gated      down(act(gate(x)) * up(x)) if true, else down(act(up(x)))
    positions  "rope" (turned by theta) or "learned" (one row for each of the max_positions)
    tied       whether the language head is the embedding
    """

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    inner_size: int
    max_positions: int
    norm: Literal["rms", "layer"]
    eps: float
    gated: bool
    activation: Activation
    attention_bias: bool
    mlp_bias: bool
    positions: Literal["rope", "learned"]
    theta: float
    tied: bool
    initializer_range: float

    @property
    def sides(self) -> dict[str, int]:
        """The sizes of the sides of a block's matrix products, by name."""
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.inner_size,
            "queries": self.heads * self.head_dim,
            "keys": self.key_value_heads * self.head_dim,
        }


@dataclass(frozen=True, slots=True)
class Stored:
    """How a tensor of a weight file is made: the parameters in `parts`, one below the other, transposed if asked.

    A part's first dim is its output; a transposed tensor holds input by output (GPT-2's layout).
    """

    name: str
    parts: tuple[str, ...]
    transposed: bool = False
