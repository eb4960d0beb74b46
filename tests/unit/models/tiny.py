"""Small models of every kind that is built, for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from danlu.models import start
from danlu.models.families import Family
from danlu.models.families.gpt2 import Gpt2
from danlu.models.families.llama import Llama
from danlu.models.stack import Trunk

VOCABULARY = 101
FAMILIES: dict[str, Family] = {
    "llama": Llama(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
    ),
    "llama-untied-biased": Llama(
        vocab_size=VOCABULARY,
        hidden_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=40,
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
        rope_theta=500.0,
        tie_word_embeddings=False,
        attention_bias=True,
        mlp_bias=True,
        hidden_act="gelu_pytorch_tanh",
    ),
    "gpt2": Gpt2(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "gpt2-untied": Gpt2(
        vocab_size=VOCABULARY,
        n_embd=24,
        n_layer=2,
        n_head=2,
        n_positions=64,
        n_inner=50,
        tie_word_embeddings=False,
        activation_function="gelu",
    ),
}


def lively(family: Family, dtype: torch.dtype = torch.float32) -> Trunk:
    """The family's model with weights large enough for attention to matter, biases and norms included."""
    model = family.build()
    start.fill(model, 5)
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.2 if parameter.dim() > 1 else 0.1
            parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=scale)
    return model.to(dtype)


def row(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions and documents [1, S] of a row that holds documents of these lengths."""
    total = sum(lengths)
    tokens = torch.randint(VOCABULARY, (1, total), generator=torch.Generator().manual_seed(seed))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
    return tokens, positions, documents


def alone(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Positions and documents of rows that hold one document each."""
    return torch.arange(tokens.shape[1]).expand_as(tokens), torch.zeros_like(tokens)
