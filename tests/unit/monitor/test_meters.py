"""Rates and times from a clock that the test moves."""

from __future__ import annotations

import time

import pytest

from danlu.monitor.meters import DataWait, Sampler, Speed, mfu
from tests.unit.monitor.reports import Clock, report


def run(speed: Speed, clock: Clock, steps: range, *, cost: float, tokens: int = 100, data: float = 0.0) -> None:
    for step in steps:
        clock.pass_by(cost)
        speed.lap(report(step, seconds=cost, data_seconds=data, tokens=tokens))


def test_after_a_resume_speed_and_time_left_are_of_this_process_alone():
    # PB-101: 1000 steps of known cost, resumed at 128, a slow validation at 200.
    clock = Clock()
    speed = Speed(total_steps=1000, start_step=128, clock=clock)
    clock.pass_by(500)  # loading the checkpoint
    assert speed.tokens_per_second is None
    assert speed.seconds_left is None
    run(speed, clock, range(129, 130), cost=5.0)  # the first update is slow: kernels are chosen
    run(speed, clock, range(130, 139), cost=0.2)
    truth = (1000 - 138) * 0.2
    assert speed.seconds_left == pytest.approx(truth, rel=0.2)
    assert speed.tokens_per_second == pytest.approx(100 / 0.2, rel=0.2)
    run(speed, clock, range(139, 201), cost=0.2)
    with speed.pause("evaluate"):
        clock.pass_by(90)
    run(speed, clock, range(201, 204), cost=0.2)
    assert speed.tokens_per_second == pytest.approx(500)
    assert speed.seconds_left == pytest.approx((1000 - 203) * 0.2)
    assert speed.paused["evaluate"] == (1, 90)


def test_pauses_that_are_known_to_come_count_in_the_time_left():
    clock = Clock()
    speed = Speed(total_steps=100, every={"evaluate": 20, "save": 50}, clock=clock)
    run(speed, clock, range(1, 21), cost=1.0)
    with speed.pause("evaluate"):
        clock.pass_by(6)
    run(speed, clock, range(21, 31), cost=1.0)
    # 70 updates, evaluations at 40, 60, 80, 100; of saves nothing is known yet
    assert speed.seconds_left == pytest.approx(70 + 4 * 6)


def test_a_pause_within_a_pause_counts_once():
    clock = Clock()
    speed = Speed(total_steps=10, clock=clock)
    run(speed, clock, range(1, 3), cost=1.0)
    with speed.pause("save"):
        clock.pass_by(2)
        with speed.pause("evaluate"):
            clock.pass_by(3)
    clock.pass_by(1)
    assert speed.lap(report(3, seconds=1.0)).seconds == pytest.approx(1.0)
    assert speed.paused == {"save": (1, 5.0)}


def test_a_pause_that_ends_in_an_error_is_over():
    clock = Clock()
    speed = Speed(total_steps=10, clock=clock)
    run(speed, clock, range(1, 2), cost=1.0)
    with pytest.raises(OSError, match="disk"), speed.pause("save"):
        clock.pass_by(7)
        raise OSError("disk")
    clock.pass_by(1)
    assert speed.lap(report(2)).seconds == pytest.approx(1.0)


def test_what_the_loop_costs_is_what_no_report_accounts_for():
    clock = Clock()
    speed = Speed(total_steps=100, clock=clock)
    for step in range(1, 41):
        clock.pass_by(1.25)
        speed.lap(report(step, seconds=0.75, data_seconds=0.25))
    assert speed.overhead == pytest.approx(0.2)
    assert speed.data_wait == pytest.approx(0.2)


def test_rates_follow_the_last_updates():
    clock = Clock()
    speed = Speed(total_steps=10_000, clock=clock)
    run(speed, clock, range(1, 200), cost=1.0)
    run(speed, clock, range(200, 260), cost=0.5)
    assert speed.tokens_per_second == pytest.approx(200)
    assert speed.measured == 50
    assert speed.tokens == 259 * 100


def test_mfu_is_the_models_arithmetic_over_the_peak():
    # 6 FLOP a parameter and token: 7e9 parameters at 3,000 tokens/s against 312 TFLOP/s.
    assert mfu(3000, flops_per_token=6 * 7e9, peak_flops=312e12) == pytest.approx(0.40385, abs=1e-5)
    assert mfu(3000, flops_per_token=6 * 7e9, peak_flops=None) is None
    assert mfu(None, flops_per_token=1.0, peak_flops=1.0) is None
    assert mfu(3000, flops_per_token=6 * 7e9, peak_flops=1e12) is None  # more than all: the peak is wrong


def wait(share: float, *, workers: int = 1, cores: int = 8) -> list[str]:
    clock = Clock()
    speed = Speed(total_steps=1000, clock=clock)
    advice = DataWait(bound=0.1, workers=workers, prefetch=2, cores=cores)
    said = []
    for step in range(1, 200):
        clock.pass_by(1.0)
        speed.lap(report(step, seconds=1.0, data_seconds=share))
        if sentence := advice.advice(speed):
            said.append(sentence)
    return said


def test_waiting_for_data_is_said_once_with_what_to_set():
    (said,) = wait(0.34)
    assert "34%" in said
    assert "data.workers to 2 (now 1; this machine has 8 cores)" in said
    assert "data.prefetch to 4 (now 2)" in said
    assert "10%" in said  # the bound


def test_no_advice_below_the_bound_nor_for_more_workers_than_cores():
    assert wait(0.05) == []
    (said,) = wait(0.5, workers=8)
    assert "faster disk" in said
    assert "data.workers to" not in said


class Meter:
    def use(self):
        return 0.5

    def watts(self):
        return 100.0

    def resident(self):
        return 7

    def held(self):
        return None


def test_the_sampler_adds_up_energy_and_ends():
    sampler = Sampler(Meter(), seconds=0.02)  # type: ignore[arg-type]
    sampler.start()
    begun = time.monotonic()
    while sampler.joules is None or sampler.joules < 5:
        assert time.monotonic() - begun < 10, "the sampler does not sample"
        time.sleep(0.01)
    sampler.stop()
    took = time.monotonic() - begun
    assert sampler.joules <= 100 * took + 10
    assert sampler.last.use == 0.5
    assert sampler.peak_resident == 7
    at_end = sampler.joules
    time.sleep(0.06)
    assert sampler.joules == at_end
