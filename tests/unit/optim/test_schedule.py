"""Learning rates, against transformers' schedules and closed values."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import (
    get_cosine_schedule_with_warmup,
    get_inverse_sqrt_schedule,
    get_linear_schedule_with_warmup,
    get_polynomial_decay_schedule_with_warmup,
    get_wsd_schedule,
)

from danlu.optim.schedule import Constant, Cosine, InverseSqrt, Linear, Polynomial, Stable

TOTAL, WARMUP = 20, 4


def rates(make) -> list[float]:
    """transformers' shares; its k-th value is used by update k + 1, so that value 0 is never trained at."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = make(optimizer, WARMUP, TOTAL)
    shares = []
    for _ in range(TOTAL):
        optimizer.step()
        schedule.step()
        shares.append(schedule.get_last_lr()[0])
    return shares


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Cosine(warmup_steps=WARMUP, final_ratio=0.0), get_cosine_schedule_with_warmup),
        (Linear(warmup_steps=WARMUP, final_ratio=0.0), get_linear_schedule_with_warmup),
    ],
    ids=["cosine", "linear"],
)
def test_equals_transformers(ours, theirs) -> None:
    assert [ours.share(update, TOTAL) for update in range(1, TOTAL + 1)] == pytest.approx(rates(theirs), abs=1e-12)


@pytest.mark.parametrize("schedule", [Cosine, Linear])
@pytest.mark.parametrize("floor", [0.0, 0.1, 1.0])
def test_the_last_update_runs_at_the_floor_and_warm_up_ends_at_the_peak(schedule, floor: float) -> None:
    made = schedule(warmup_steps=WARMUP, final_ratio=floor)
    assert made.share(1, TOTAL) == 1 / WARMUP
    assert made.share(WARMUP, TOTAL) == 1.0
    assert made.share(TOTAL, TOTAL) == pytest.approx(floor, abs=1e-15)


def test_cosine_passes_half_way_at_half_time() -> None:
    assert Cosine(warmup_steps=10, final_ratio=0.0).share(60, 110) == pytest.approx(0.5)
    assert Cosine(warmup_steps=10, final_ratio=0.2).share(35, 110) == pytest.approx(
        0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2
    )


def test_constant_stays_and_needs_no_warm_up() -> None:
    assert [Constant(warmup_steps=2).share(u, 5) for u in range(1, 6)] == [0.5, 1, 1, 1, 1]
    assert Constant().share(1, 5) == 1.0


def test_a_run_of_one_update_has_a_rate() -> None:
    assert Cosine(final_ratio=0.1).share(1, 1) == pytest.approx(0.1)


@pytest.mark.parametrize(("shape", "theirs"), [("linear", "linear"), ("sqrt", "1-sqrt"), ("cosine", "cosine")])
def test_wsd_equals_transformers(shape, theirs: str) -> None:
    ours = Stable(warmup_steps=WARMUP, decay_steps=6, shape=shape, final_ratio=0.0)
    expected = rates(lambda optimizer, warmup, total: get_wsd_schedule(optimizer, warmup, 6, total, decay_type=theirs))
    assert [ours.share(update, TOTAL) for update in range(1, TOTAL + 1)] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("shape", ["linear", "sqrt", "cosine"])
def test_wsd_falls_over_its_share_to_its_floor(shape) -> None:
    made = Stable(warmup_steps=10, decay_ratio=0.25, shape=shape, final_ratio=0.2)
    assert [made.share(update, 100) for update in (5, 10, 11, 75)] == [0.5, 1, 1, 1]
    half = {"linear": 0.5, "sqrt": 1 - 0.5**0.5, "cosine": 0.5}[shape]
    assert Stable(decay_steps=20, shape=shape, final_ratio=0.2).share(90, 100) == pytest.approx(0.2 + 0.8 * half)
    assert made.share(100, 100) == pytest.approx(0.2, abs=1e-15)
    falling = [made.share(update, 100) for update in range(75, 101)]
    assert falling == sorted(falling, reverse=True) and len(set(falling)) == 26


def test_wsd_does_not_know_the_end_before_its_decay_and_never_cuts_warm_up() -> None:
    made = Stable(warmup_steps=10, decay_steps=20)
    assert [made.share(update, 100) for update in range(1, 81)] == [made.share(update, 1000) for update in range(1, 81)]
    assert Stable(warmup_steps=8, decay_steps=20).share(8, 10) == 1.0
    assert Stable(warmup_steps=8, decay_steps=20).share(9, 10) == pytest.approx(1 - 0.5**0.5)
    assert Stable(decay_steps=0).share(10, 10) == 1.0


@pytest.mark.parametrize("timescale", [None, 30])
@pytest.mark.parametrize("warmup", [0, WARMUP])
def test_inverse_sqrt_equals_transformers(timescale: int | None, warmup: int) -> None:
    ours = InverseSqrt(warmup_steps=warmup, timescale=timescale)
    expected = rates(lambda optimizer, _, total: get_inverse_sqrt_schedule(optimizer, warmup, timescale))
    assert [ours.share(update, TOTAL) for update in range(1, TOTAL + 1)] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("power", "floor"), [(1.0, 0.0), (2.0, 0.1), (0.5, 0.3)])
def test_polynomial_equals_transformers(power: float, floor: float) -> None:
    ours = Polynomial(warmup_steps=WARMUP, power=power, final_ratio=floor)
    expected = rates(
        lambda optimizer, warmup, total: get_polynomial_decay_schedule_with_warmup(
            optimizer, warmup, total, lr_end=floor, power=power
        )
    )
    assert [ours.share(update, TOTAL) for update in range(1, TOTAL + 1)] == pytest.approx(expected, abs=1e-12)


def test_without_warm_up_the_first_update_runs_at_the_peak_and_the_last_at_the_floor() -> None:
    """One update less of a fall than others make: theirs ends one update after the last."""
    for made in (Linear(), Cosine(final_ratio=0.0), Polynomial(power=3.0)):
        assert made.share(1, TOTAL) == 1.0
        assert made.share(TOTAL, TOTAL) == pytest.approx(0.0, abs=1e-15)


@pytest.mark.parametrize("made", [Linear, Cosine, Constant, Stable, InverseSqrt, Polynomial])
def test_warm_up_is_a_line_that_ends_at_the_peak(made) -> None:
    assert [made(warmup_steps=4).share(update, 50) for update in range(1, 5)] == [0.25, 0.5, 0.75, 1.0]
