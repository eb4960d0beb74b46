"""AdamW by its paper's formula; groups; clipping; state by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from danlu.optim.adamw import AdamW
from danlu.optim.groups import split
from danlu.optim.layer import OptimLayer
from danlu.optim.schedule import Constant, Linear


def model(dtype: torch.dtype = torch.float64) -> nn.Module:
    made = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Embedding(5, 2)).to(dtype)
    source = torch.Generator().manual_seed(3)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=source, dtype=torch.float64).to(dtype)
    return made


def test_adamw_follows_algorithm_2_of_the_paper_for_twelve_updates() -> None:
    made = model()
    settings = AdamW(
        learning_rate=0.01, weight_decay=0.1, betas=(0.9, 0.95), max_grad_norm=0, schedule=Linear(warmup_steps=3)
    )
    layer = OptimLayer(settings, made.named_parameters(), total=12)
    weights = {name: p.detach().clone() for name, p in made.named_parameters()}
    first = {name: torch.zeros_like(w) for name, w in weights.items()}
    second = {name: torch.zeros_like(w) for name, w in weights.items()}
    source = torch.Generator().manual_seed(4)
    for update in range(1, 13):
        rate = 0.01 * (update / 3 if update <= 3 else 1 - (update - 3) / 9)
        for name, parameter in made.named_parameters():
            grad = torch.randn(parameter.shape, generator=source, dtype=torch.float64)
            parameter.grad = grad.clone()
            first[name] = 0.9 * first[name] + 0.1 * grad
            second[name] = 0.95 * second[name] + 0.05 * grad**2
            moment = first[name] / (1 - 0.9**update)
            root = (second[name] / (1 - 0.95**update)).sqrt() + 1e-8
            decay = 0.1 if parameter.dim() >= 2 else 0.0
            weights[name] = weights[name] - rate * (moment / root + decay * weights[name])
        layer.step(update)
        layer.zero()
    for name, parameter in made.named_parameters():
        torch.testing.assert_close(parameter.detach(), weights[name], rtol=1e-12, atol=1e-12)


def test_only_matrices_and_tables_decay() -> None:
    groups = split(model().named_parameters(), weight_decay=0.5)
    assert {g.role: (g.weight_decay, sorted(g.parameters), g.count) for g in groups} == {
        "matrix": (0.5, ["0.weight", "2.weight"], 22),
        "vector": (0.0, ["0.bias", "1.bias", "1.weight"], 12),
    }
    made = model()
    before = {name: p.detach().clone() for name, p in made.named_parameters()}
    layer = OptimLayer(
        AdamW(learning_rate=0.1, weight_decay=0.5, schedule=Constant()), made.named_parameters(), total=1
    )
    for parameter in made.parameters():
        parameter.grad = torch.zeros_like(parameter)
    layer.step(1)
    for name, parameter in made.named_parameters():
        expected = before[name] * (0.95 if parameter.dim() >= 2 else 1.0)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_clipping_equals_torchs(share: float) -> None:
    ours, theirs = model(), model()
    for a, b in zip(ours.parameters(), theirs.parameters()):
        a.grad, b.grad = torch.ones_like(a) * 3, torch.ones_like(b) * 3
    norm = torch.nn.utils.get_total_norm([p.grad for p in ours.parameters()])
    limit = norm.item() * share
    layer = OptimLayer(AdamW(max_grad_norm=limit), ours.named_parameters(), total=1)
    layer.clip(norm)
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), limit)
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=0)
    assert torch.nn.utils.get_total_norm([p.grad for p in ours.parameters()]).item() == pytest.approx(
        min(limit, norm.item()), rel=1e-6
    )


def test_state_goes_by_name_not_by_position() -> None:
    class Two(nn.Module):
        def __init__(self, order: str) -> None:
            super().__init__()
            for name in order:
                setattr(self, name, nn.Parameter(torch.zeros(2, 2)))

    one, other = Two("ab"), Two("ba")
    first = OptimLayer(AdamW(), one.named_parameters(), total=2)
    one.a.grad, one.b.grad = torch.full((2, 2), 1.0), torch.full((2, 2), 2.0)
    first.step(1)
    second = OptimLayer(AdamW(), other.named_parameters(), total=2)
    second.restore([{key: value.clone()} for key, value in first.state().items()])
    assert torch.equal(second.torch.state[other.a]["exp_avg"], first.torch.state[one.a]["exp_avg"])
    assert second.torch.state[other.b]["exp_avg"][0, 0].item() == pytest.approx(0.2)
    with pytest.raises(KeyError):
        second.restore([{"exp_avg/gone": torch.zeros(2, 2)}])


def test_small_updates_and_decay_are_kept_where_bf16_would_lose_them() -> None:
    """Weights stay fp32 under bf16 products: 100 updates of 1e-3 move 1.0 to 0.90; in bf16 it would not move at all."""
    weight = nn.Parameter(torch.ones(4, 4))
    layer = OptimLayer(
        AdamW(learning_rate=1e-3, weight_decay=0.0, schedule=Constant()), [("weight", weight)], total=100
    )
    for update in range(1, 101):
        weight.grad = torch.ones_like(weight)
        layer.step(update)
    assert weight[0, 0].item() == pytest.approx(0.9, abs=1e-3)

    weight = nn.Parameter(torch.ones(4, 4))
    layer = OptimLayer(
        AdamW(learning_rate=1e-3, weight_decay=0.1, schedule=Constant()), [("weight", weight)], total=1000
    )
    for update in range(1, 1001):
        weight.grad = torch.zeros_like(weight)
        layer.step(update)
    assert weight[0, 0].item() == pytest.approx((1 - 1e-4) ** 1000, rel=1e-3)
