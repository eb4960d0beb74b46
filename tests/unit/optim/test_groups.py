"""Which weights are updated alike, and at which rate."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from danlu.core.config import checked, load
from danlu.core.errors import InputError
from danlu.optim.adamw import AdamW
from danlu.optim.groups import Rate, split
from danlu.optim.layer import OptimLayer
from danlu.optim.schedule import Constant, Linear

NAMED = {
    "embed.weight": (50, 8),
    "blocks.0.norm.weight": (8,),
    "blocks.0.mlp.up.weight": (32, 8),
    "blocks.0.mlp.up.bias": (32,),
    "blocks.0.mlp.down.weight": (8, 32),
    "head.weight": (50, 8),
}
ROLES = dict(zip(NAMED, ("embedding", "norm", "matrix", "bias", "matrix", "head")))


def named() -> list[tuple[str, nn.Parameter]]:
    return [(name, nn.Parameter(torch.ones(shape, dtype=torch.float64))) for name, shape in NAMED.items()]


def test_a_group_for_each_role_and_rate() -> None:
    rates = [Rate(role="matrix", rate=0.5, width=16), Rate(role="embedding", rate=2.0)]
    groups = split(named(), weight_decay=0.1, roles=ROLES, rates=rates)
    assert [(g.role, list(g.parameters), g.weight_decay, g.rate, g.count) for g in groups] == [
        ("embedding", ["embed.weight"], 0.1, 2.0, 400),
        ("norm", ["blocks.0.norm.weight"], 0.0, 1.0, 8),
        ("matrix", ["blocks.0.mlp.up.weight"], 0.1, 1.0, 256),  # 0.5 * 16 / 8 inputs
        ("bias", ["blocks.0.mlp.up.bias"], 0.0, 1.0, 32),
        ("matrix", ["blocks.0.mlp.down.weight"], 0.1, 0.25, 256),  # 0.5 * 16 / 32 inputs
        ("head", ["head.weight"], 0.1, 1.0, 400),
    ]


def test_twice_the_width_has_half_the_rate() -> None:
    rate = Rate(role="matrix", width=64)
    assert [rate.of(torch.empty(7, inputs)) for inputs in (64, 128, 256)] == [1.0, 0.5, 0.25]


def test_each_role_moves_at_its_rate_all_along_the_schedule() -> None:
    """Under a constant gradient Adam moves each number by the rate itself: 1 -> 1 - rate."""
    weights = named()
    settings = AdamW(
        learning_rate=0.01,
        weight_decay=0.0,
        eps=1e-12,
        schedule=Linear(warmup_steps=2, final_ratio=0.5),
        rates=[Rate(role="norm", rate=3.0), Rate(role="matrix", width=8)],
    )
    layer = OptimLayer(settings, weights, total=3, roles=ROLES)
    for update in (1, 2, 3):
        for _, weight in weights:
            weight.grad = torch.ones_like(weight)
        layer.step(update)
    gone = 0.01 * (0.5 + 1.0 + 0.5)
    factor = {"norm": 3.0, "matrix": 1.0}
    for name, weight in weights:
        own = factor.get(ROLES[name], 1.0) * (0.25 if name.endswith("down.weight") else 1.0)
        torch.testing.assert_close(weight.detach(), torch.full_like(weight, 1 - gone * own), rtol=1e-9, atol=0)
    assert layer.rate(2) == 0.01  # what is reported is the run's


def test_a_weight_that_is_not_trained_is_in_no_group() -> None:
    weights = named()
    weights[0][1].requires_grad_(False)
    assert "embed.weight" not in {n for g in split(weights, weight_decay=0.1, roles=ROLES) for n in g.parameters}


def test_what_cannot_be_is_refused(tmp_path) -> None:
    with pytest.raises(InputError, match="norm weights does not go by width"):
        load(AdamW, "rates: [{role: norm, width: 64}]", file=tmp_path / "a.yaml")
    with pytest.raises(InputError, match="matrix stands there twice"):
        load(AdamW, "rates: [{role: matrix, rate: 2}, {role: matrix, width: 64}]", file=tmp_path / "a.yaml")
    with pytest.raises(InputError, match="role: must be embedding, head, matrix, norm or bias, not atention"):
        load(AdamW, "rates: [{role: atention}]", file=tmp_path / "a.yaml")
    assert checked(AdamW(schedule=Constant(), rates=[Rate(role="head", rate=0.1, width=256)])).rates[0].width == 256
