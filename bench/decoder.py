"""The decoder that danlu's benches train, and its batches: the sizes are those of `common.options`."""

from __future__ import annotations

import argparse

import torch

from danlu.core.batch import Batch
from danlu.models.families.llama import Llama


def family(chosen: argparse.Namespace) -> Llama:
    """A Llama of the chosen sizes."""
    return Llama(
        vocab_size=chosen.vocab,
        hidden_size=chosen.dim,
        num_hidden_layers=chosen.layers,
        num_attention_heads=chosen.heads,
        num_key_value_heads=chosen.heads,
        intermediate_size=chosen.ffn,
        max_position_embeddings=max(chosen.seq, 1024),
        tie_word_embeddings=True,
    )


def batch(block: torch.Tensor) -> Batch:
    """Rows of ids [B, S + 1] as a batch: one document each, every token but the first a label."""
    places = torch.arange(block.shape[1] - 1).expand(len(block), -1)
    return Batch(
        tokens=block[:, :-1].contiguous(),
        labels=block[:, 1:].contiguous(),
        positions=places,
        documents=torch.zeros_like(places),
        packed=False,
        samples=("",) * len(block),
    )
