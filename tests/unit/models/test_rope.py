"""Rotary tables against float64, in half precision and at length; turning against its matrix."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from danlu.models import weights
from danlu.models.rope import rotate, rotation
from tests.unit.models.tiny import FAMILIES, VOCABULARY, alone, lively


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.005), (torch.float32, 1e-3), (torch.float64, 1e-12)])
def test_table_is_near_float64_at_length_4096(dtype: torch.dtype, bound: float) -> None:
    positions = torch.arange(4096)[None]
    tables = rotation(positions, head_dim=64, theta=10000.0, dtype=dtype)
    for function, table in zip((math.cos, math.sin), tables):
        assert table.dtype == dtype
        for place in (1, 255, 256, 257, 1023, 4094, 4095):
            exact = [function(place * 10000.0 ** (-2 * i / 64)) for i in range(32)]
            assert (table[0, place, 0].double() - torch.tensor(exact, dtype=torch.float64)).abs().max() < bound


def test_far_positions_of_a_bf16_model_are_told_apart_also_after_reload(tmp_path: Path) -> None:
    """Attention depends on distance alone, so a document far from the start reads as it does at the start."""
    family = FAMILIES["llama"]
    model = lively(family, torch.bfloat16)
    weights.save(tmp_path, family, model.named_parameters(), dtype=torch.bfloat16)
    tokens = torch.randint(VOCABULARY, (4, 40), generator=torch.Generator().manual_seed(0))
    near, documents = alone(tokens)
    far = near + 4000
    coarse = far.bfloat16().long()  # what positions cast with the model come to
    for one in (model, weights.restore(tmp_path)[1]):
        assert next(one.parameters()).dtype == torch.bfloat16
        a, b, c = (one(tokens, place, documents, False).float() for place in (near, far, coarse))
        assert (a - b).abs().mean() < 0.2 * (a - c).abs().mean()


def test_turning_is_a_rotation_and_its_gradient_the_inverse() -> None:
    draw = torch.Generator().manual_seed(0)
    heads = torch.randn(2, 5, 3, 8, dtype=torch.float64, generator=draw, requires_grad=True)
    positions = torch.tensor([[0, 1, 2, 3, 4], [9, 0, 1, 0, 7]])
    turn = rotation(positions, head_dim=8, theta=100.0, dtype=torch.float64)
    turned = rotate(heads, turn)
    for b, s in ((0, 3), (1, 0), (1, 4)):
        for i in range(4):
            angle = positions[b, s].item() * 100.0 ** (-2 * i / 8)
            x, y = heads[b, s, 1, i].item(), heads[b, s, 1, i + 4].item()
            assert turned[b, s, 1, i].item() == pytest.approx(x * math.cos(angle) - y * math.sin(angle), abs=1e-12)
            assert turned[b, s, 1, i + 4].item() == pytest.approx(y * math.cos(angle) + x * math.sin(angle), abs=1e-12)
    assert torch.autograd.gradcheck(lambda h: rotate(h, turn), (heads,))
