"""Parameters, and FLOPs a token costs: closed formulas of a shape."""

from __future__ import annotations

from danlu.models.shape import Shape


def parameters(shape: Shape) -> int:
    """How many numbers are learned; a tied head counts once."""
    size, queries, keys = shape.hidden_size, shape.heads * shape.head_dim, shape.key_value_heads * shape.head_dim
    block = _products(shape)
    if shape.attention_bias:
        block += queries + 2 * keys + size
    if shape.mlp_bias:
        block += (2 if shape.gated else 1) * shape.inner_size + size
    norm = size * (2 if shape.norm == "layer" else 1)
    table = shape.vocab_size * size
    places = shape.max_positions * size if shape.positions == "learned" else 0
    return table * (1 if shape.tied else 2) + places + shape.layers * (block + 2 * norm) + norm


def flops_per_token(shape: Shape, sequence_length: int, *, backward: bool = True) -> int:
    """Multiplications and additions of matrix products for one token of a row of that length, the head's included.

    Attention counts every pair of a row, as is usual for MFU (PaLM, arXiv:2204.02311, appendix B): no discount for the
    causal half or for packed documents. The backward pass costs twice the forward's; recomputation is not counted.
    """
    products = shape.layers * _products(shape) + shape.vocab_size * shape.hidden_size
    attention = shape.layers * 2 * sequence_length * shape.heads * shape.head_dim
    return (3 if backward else 1) * 2 * (products + attention)


def _products(shape: Shape) -> int:
    """Weights of one block that take part in a matrix product."""
    size, queries, keys = shape.hidden_size, shape.heads * shape.head_dim, shape.key_value_heads * shape.head_dim
    return size * (2 * queries + 2 * keys) + (3 if shape.gated else 2) * size * shape.inner_size
