"""The moving average of the weights, against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from danlu.optim.adamw import AdamW
from danlu.optim.average import Average, Averages
from danlu.optim.layer import OptimLayer
from danlu.optim.schedule import Constant


def model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)).to(dtype)


def move(weights: nn.Module, update: int) -> None:
    source = torch.Generator().manual_seed(update)
    with torch.no_grad():
        for parameter in weights.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=source, dtype=torch.float64).to(parameter.dtype))


def test_equals_torchs_for_twelve_updates() -> None:
    made = model()
    ours = Averages(Average(decay=0.9, warmup=False), dict(made.named_parameters()))
    theirs = AveragedModel(made, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for update in range(1, 13):
        move(made, update)
        ours.follow(update, ours.named)
        theirs.update_parameters(made)
        for name, parameter in theirs.module.named_parameters():
            torch.testing.assert_close(ours.held[name], parameter.detach(), rtol=1e-15, atol=1e-15)


def test_the_decay_warms_up_so_that_the_first_weights_are_forgotten() -> None:
    assert [Average(decay=0.99).keeps(update) for update in (1, 8, 10**6)] == [2 / 11, 0.5, 0.99]
    assert Average(decay=0.99, warmup=False).keeps(1) == 0.99
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    ours = Averages(Average(decay=0.999), {"w": weight})
    expected = None
    for update in range(1, 9):
        weight.data.fill_(float(update))
        ours.follow(update, ours.named)
        keep = (1 + update) / (10 + update)
        expected = float(update) if expected is None else keep * expected + (1 - keep) * update
        assert ours.held["w"].item() == pytest.approx(expected, rel=1e-14)


def test_it_is_kept_in_at_least_fp32_where_weights_are_low() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    ours = Averages(Average(decay=0.999, warmup=False), {"w": weight})
    ours.follow(1, ours.named)
    weight.data.fill_(1.5)
    ours.follow(2, ours.named)
    assert ours.held["w"].dtype == torch.float32 and ours.held["w"][0].item() == pytest.approx(1.0005, abs=1e-7)
    double = Averages(Average(), {"w": nn.Parameter(torch.ones(2, dtype=torch.float64))})
    double.follow(1, double.named)
    assert double.held["w"].dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_place_for_a_while_and_the_weights_come_back_to_the_bit(dtype: torch.dtype) -> None:
    made = model(dtype)
    ours = Averages(Average(decay=0.5, warmup=False), dict(made.named_parameters()))
    for update in (1, 2, 3):
        move(made, update)
        ours.follow(update, ours.named)
    before = {name: p.detach().clone() for name, p in made.named_parameters()}
    with pytest.raises(ZeroDivisionError), ours.in_place():
        for name, parameter in made.named_parameters():
            assert torch.equal(parameter.detach(), ours.held[name].to(dtype))
            assert not torch.equal(parameter.detach(), before[name])
        raise ZeroDivisionError
    assert all(torch.equal(p.detach(), before[name]) for name, p in made.named_parameters())


def test_it_goes_through_the_layer_by_name() -> None:
    settings = AdamW(schedule=Constant(), average=Average(decay=0.9))

    def trained(layer: OptimLayer, made: nn.Module, updates: range) -> None:
        for update in updates:
            for parameter in made.parameters():
                parameter.grad = torch.full_like(parameter, float(update))
            layer.step(update)
            layer.zero()

    whole, half = model(), model()
    first, second = (OptimLayer(settings, m.named_parameters(), total=6) for m in (whole, half))
    trained(first, whole, range(1, 7))
    trained(second, half, range(1, 4))
    third = OptimLayer(settings, half.named_parameters(), total=6)
    third.restore([{key: value.clone() for key, value in second.state().items()}])
    assert {key for key in third.state() if key.startswith("average/")} == {
        f"average/{n}" for n, _ in half.named_parameters()
    }
    trained(third, half, range(4, 7))
    for key, value in first.state().items():
        assert torch.equal(value, third.state()[key]), key


def test_a_weight_without_a_gradient_has_no_average_and_stays_itself() -> None:
    made = model()
    layer = OptimLayer(AdamW(average=Average()), made.named_parameters(), total=2)
    asleep = made[1].bias
    for update in (1, 2):
        for parameter in made.parameters():
            parameter.grad = None if parameter is asleep else torch.ones_like(parameter)
        layer.step(update)
    assert layer.averages is not None and set(layer.averages.held) == {"0.weight", "0.bias", "1.weight"}
    assert not any(key.endswith("/1.bias") for key in layer.state())
    before = asleep.detach().clone()
    with layer.averages.in_place():
        assert torch.equal(asleep.detach(), before)
