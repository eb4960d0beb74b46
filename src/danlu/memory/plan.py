"""Settings of the memory layer, and how many rows fit in one forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from danlu.core.config import setting
from danlu.memory.precision import Name


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What is kept, where, and how precisely."""

    precision: Name = setting("auto", "fp32 | bf16 (products; weights stay fp32) | fp64 (for proofs) | auto")
    recompute: Literal["none"] = setting("none", "activations that are computed again in the backward")
    offload: list[str] = setting([], "what is kept on the host: nothing yet")


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The sizes that decide memory: of the model, of the row, of a number."""

    parameters: int
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    query_size: int
    key_size: int
    sequence_length: int
    product_bytes: int
    weight_bytes: int
    head_rows: int = 1024

    @property
    def state_bytes(self) -> int:
        """Weights, gradients and AdamW's two moments: four numbers a weight."""
        return 4 * self.parameters * self.weight_bytes

    @property
    def row_bytes(self) -> int:
        """Activations kept for the backward of one row.

        Per token and layer: the residual stream twice and its two norms' inputs and outputs (6 x hidden), queries,
        keys, values and the attention output (2 x query + 2 x key), and the gated MLP's gate, up and product
        (3 x intermediate). Products are stored as computed, the residual stream in the weights' precision. The head
        keeps a gradient of the hidden states, never logits.
        """
        low = 2 * self.query_size + 2 * self.key_size + 3 * self.intermediate_size + 3 * self.hidden_size
        high = 3 * self.hidden_size
        layer = low * self.product_bytes + high * self.weight_bytes
        return self.sequence_length * (self.layers * layer + 4 * self.hidden_size * self.weight_bytes)

    @property
    def head_bytes(self) -> int:
        """One chunk of logits and its gradient, in fp32, and a weight gradient of the head."""
        return (2 * self.head_rows + self.hidden_size) * self.vocab_size * 4

    def total(self, rows: int, *, shards: int = 1) -> int:
        """Bytes on one rank with this many rows in a forward; weights and states are cut over `shards` ranks."""
        return self.state_bytes // shards + self.head_bytes + rows * self.row_bytes


ROOM = 0.8  # share of the free memory that may be planned with: allocators and libraries want the rest


def rows_that_fit(footprint: Footprint, *, rows: int, free_bytes: int, shards: int = 1) -> int:
    """The largest divisor of `rows` whose micro-batch fits in the free memory; 1 where not even that does.

    A divisor, so that every micro-batch of an update is alike.
    """
    divisors = [size for size in range(rows, 0, -1) if rows % size == 0]
    fits = (size for size in divisors if footprint.total(size, shards=shards) <= ROOM * free_bytes)
    return next(fits, 1)
