"""Gradients within bounds, against torch's own clipping."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from danlu.optim.clip import clip


def made() -> list[nn.Parameter]:
    source = torch.Generator().manual_seed(5)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((3, 4), (7,), (2, 2, 2))]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=source) * 3
    return [*parameters, nn.Parameter(torch.zeros(2))]  # the last has no gradient


def gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def norm(parameters: list[nn.Parameter]) -> float:
    return torch.nn.utils.get_total_norm(gradients(parameters)).item()


@pytest.mark.parametrize("limit", [0.1, 2.0, 100.0])
def test_by_value_equals_torchs(limit: float) -> None:
    ours, theirs = made(), made()
    clip(ours, norm(ours), max_norm=0, max_value=limit)
    torch.nn.utils.clip_grad_value_(theirs, limit)
    for a, b in zip(gradients(ours), gradients(theirs), strict=True):
        assert torch.equal(a, b)


def test_norm_comes_first_then_value_and_both_bounds_hold() -> None:
    ours, theirs = made(), made()
    clip(ours, norm(ours), max_norm=4.0, max_value=0.7)
    torch.nn.utils.clip_grad_norm_(theirs, 4.0)
    torch.nn.utils.clip_grad_value_(theirs, 0.7)
    for a, b in zip(gradients(ours), gradients(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)
    assert norm(ours) < 4.0 and max(g.abs().max().item() for g in gradients(ours)) == pytest.approx(0.7)
    other = made()  # the other order gives other gradients
    torch.nn.utils.clip_grad_value_(other, 0.7)
    torch.nn.utils.clip_grad_norm_(other, 4.0)
    assert any((a - b).abs().max() > 0.05 for a, b in zip(gradients(ours), gradients(other)))


def test_nothing_is_clipped_where_nothing_is_asked() -> None:
    ours, before = made(), gradients(made())
    clip(ours, norm(ours), max_norm=0, max_value=None)
    clip(ours, norm(ours), max_norm=1e6, max_value=1e6)
    clip([nn.Parameter(torch.zeros(2))], 0.0, max_norm=1.0, max_value=1.0)
    for a, b in zip(gradients(ours), before, strict=True):
        assert torch.equal(a, b)
