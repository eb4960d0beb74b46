"""Learning rates, against transformers' schedules and closed values."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from danlu.optim.schedule import Constant, Cosine, Linear

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
