"""Closed formulas against what torch counts."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from danlu.models import count
from tests.unit.models.tiny import FAMILIES, VOCABULARY, alone, lively


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_are_as_many_as_there_are(name: str) -> None:
    family = FAMILIES[name]
    assert count.parameters(family.shape()) == sum(p.numel() for p in family.build().parameters())


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("backward", [False, True])
def test_flops_are_what_torch_counts(name: str, backward: bool) -> None:
    """Attention by the plain formula's kernel: fused ones make some products again in the backward."""
    model = lively(FAMILIES[name])
    tokens = torch.randint(VOCABULARY, (2, 24))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        scores = model.heads["language"].logits(model(tokens, *alone(tokens), False))
        if backward:
            scores.sum().backward()
    per_token = count.flops_per_token(FAMILIES[name].shape(), 24, backward=backward)
    assert per_token * tokens.numel() == counter.get_total_flops()
