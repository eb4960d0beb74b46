"""The loss scale goes the way of torch's GradScaler, and changes no bit of what does not overflow."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from danlu.core.errors import InputError
from danlu.memory.layer import MemoryLayer
from danlu.memory.precision import choose
from danlu.memory.scale import LossScale, Scale

CPU = torch.device("cpu")


def grad_scalers(overflows: list[bool], *, start: float, interval: int) -> list[float]:
    """The scale that torch's GradScaler has before each update."""
    scaler = torch.amp.GradScaler("cpu", init_scale=start, growth_interval=interval)
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scales = []
    for overflow in overflows:
        scales.append(scaler.get_scale())
        scaler.scale(weight.sum()).backward()
        if overflow:
            weight.grad[1] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return scales


@pytest.mark.parametrize("seed", range(4))
def test_it_moves_as_torchs_does(seed: int) -> None:
    draw = random.Random(seed)
    overflows = [draw.random() < 0.15 for _ in range(200)]
    scale = Scale(LossScale(start=2.0**20, growth_interval=4, largest=2.0**60))
    mine = []
    for overflow in overflows:
        mine.append(scale.value)
        scale.settle(not overflow)
    assert mine == grad_scalers(overflows, start=2.0**20, interval=4)
    assert len(set(mine)) > 5 and min(mine) > 1  # below 1 torch's goes on, ours does not


def test_it_stays_within_its_bounds() -> None:
    scale = Scale(LossScale(start=4, growth_interval=1, largest=8))
    seen = []
    for sound in [False, False, False, False, True, True, True, True, True]:
        scale.settle(sound)
        seen.append(scale.value)
    assert seen == [2, 1, 1, 1, 2, 4, 8, 8, 8]


def test_it_goes_on_from_its_state() -> None:
    one, other = (Scale(LossScale(growth_interval=3)) for _ in range(2))
    for sound in (True, False, True, True):
        one.settle(sound)
    other.restore(one.state())
    for each in (one, other):
        each.settle(True)
    assert one.value == other.value == 65536 and one.sound == other.sound == 0
    with pytest.raises(KeyError):
        other.restore({})


@pytest.mark.parametrize("field", ["start", "largest"])
def test_what_is_no_power_of_two_is_refused(field: str) -> None:
    with pytest.raises(InputError, match=rf"memory.loss_scale.{field}: 70000 is no power of two.*; 65536 would do"):
        LossScale(**{field: 70000.0})
    with pytest.raises(InputError, match="more than largest"):
        LossScale(start=2.0**30)


@pytest.mark.parametrize("start", [1.0, 2.0**16, 2.0**24])
def test_gradients_are_those_without_a_scale_to_the_bit(start: float) -> None:
    gradients = []
    for scale in (None, Scale(LossScale(start=start))):
        draw = torch.Generator().manual_seed(1)
        weights = [nn.Parameter(torch.randn(n, 5, generator=draw, dtype=torch.float64)) for n in (3, 4)]
        memory = MemoryLayer(device=CPU, precision=choose("fp64", CPU), weights=weights, scale=scale)
        with memory.policy():
            for _ in range(3):
                total = sum(
                    (w.sin() * torch.randn(w.shape, generator=draw, dtype=torch.float64)).sum() for w in weights
                )
                total.backward(memory.upstream(total))
        gradients.append([w.grad for w in weights])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_an_overflow_stays_one_and_halves_the_scale() -> None:
    weight = nn.Parameter(torch.full((4,), 1e4))
    memory = MemoryLayer(device=CPU, precision=choose("fp16", CPU), weights=[weight], scale=Scale(LossScale()))
    with memory.policy():
        total = (weight.half() * 3).float().sum()
        total.backward(memory.upstream(total))
    assert not weight.grad.isfinite().any()  # 3 * 65536 is more than fp16 has
    assert memory.settle(False) == {"loss_scale": 65536.0}
    assert memory.settle(True) == {"loss_scale": 32768.0}
    assert memory.state() == {"loss_scale": 32768.0, "sound": 1}
    memory.restore({})  # of a run that was in bf16 until now
    memory.restore({"loss_scale": 2.0, "sound": 7})
    assert memory.state() == {"loss_scale": 2.0, "sound": 7}


def test_without_fp16_there_is_none() -> None:
    memory = MemoryLayer(device=CPU, precision=choose("fp32", CPU))
    assert memory.upstream(torch.ones(())) is None and memory.settle(True) == {} and memory.state() == {}
