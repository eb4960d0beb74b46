"""Where the loss is going."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from danlu.monitor.causes import Finding, Likely
from danlu.monitor.reading import read
from danlu.monitor.spikes import Trouble
from danlu.monitor.trend import Trend
from tests.unit.monitor.reports import report


def trend(**changes: float) -> Trend:
    return Trend(**({"rise": 1.5, "plateau": 100} | changes))  # type: ignore[arg-type]


def run(losses, made: Trend | None = None, *, rate: float = 1e-3, norm: float = 1.0, dead=(), start: int = 1):
    """Everything told, and the first trouble."""
    made = made or trend()
    told: list[tuple[int, Finding]] = []
    for step, loss in enumerate(losses, start):
        findings, trouble = made.see(read(report(step, loss=float(loss), rate=rate, norm=norm)), dead)
        told += [(step, finding) for finding in findings]
        if trouble is not None:
            return told, trouble
    return told, None


def falling(steps: int, *, noise: float = 0.05, seed: int = 1, first: float = 5.5, last: float = 2.0) -> np.ndarray:
    curve = last + (first - last) * np.exp(-np.arange(steps) / 40)
    return curve * np.exp(np.random.default_rng(seed).normal(scale=noise, size=steps))


@pytest.mark.parametrize("noise", [0.01, 0.1, 0.3])
@pytest.mark.parametrize("seed", range(10))
def test_a_loss_that_falls_and_levels_off_is_nobodys_worry(noise: float, seed: int) -> None:
    told, trouble = run(falling(400, noise=noise, seed=seed), trend(plateau=10_000))
    assert (told, trouble) == ([], None)


@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_a_slow_divergence_is_trouble_and_its_good_time_is_known(noise: float) -> None:
    losses = np.concatenate([falling(160, noise=noise), falling(160, noise=noise)[-1] * 1.02 ** np.arange(1, 61)])
    told, trouble = run(losses)
    assert isinstance(trouble, Trouble) and trouble.kind == "rise"
    assert 96 <= trouble.before <= 176 < trouble.step <= 224
    assert {finding.kind for _, finding in told} <= {"rising"}
    assert all(finding.likely is Likely.RATE for _, finding in told)


def test_a_loss_above_its_first_is_trouble_without_a_good_time() -> None:
    _, trouble = run([5.5] + [30.0] * 40)
    assert trouble is not None and trouble.before == 0 and "before the first update" in trouble.cause


def test_a_single_high_loss_is_none() -> None:
    losses = falling(200)
    losses[::7] *= 4
    assert run(losses, trend(plateau=10_000))[1] is None


def test_swinging_is_told_once_with_the_rate() -> None:
    losses = np.concatenate([falling(200, noise=0.01), 2.1 + 0.5 * (-1.0) ** np.arange(100)])
    told, _ = run(losses, trend(plateau=10_000, rise=3.0))
    assert [(finding.kind, finding.likely) for _, finding in told] == [("swinging", Likely.RATE)]


@pytest.mark.parametrize(
    ("more", "likely"),
    [
        ({"rate": 0.0}, Likely.FROZEN),
        ({"norm": 0.0}, Likely.FROZEN),
        ({"dead": ("blocks.1",)}, Likely.LAYER),
        ({}, Likely.SLOW),
    ],
)
def test_standing_still_is_told_once_with_its_likely_cause(more: dict, likely: Likely) -> None:
    flat = 5.5 * np.exp(np.random.default_rng(4).normal(scale=0.001, size=300))
    made = trend(peak=0.0 if "rate" in more else math.inf) if "rate" in more else trend(peak=1e-3)
    told, _ = run(flat, made, **more)
    assert [(finding.kind, finding.likely) for _, finding in told] == [("plateau", likely)]


def test_a_rate_that_has_run_down_stands_still_by_right() -> None:
    told, _ = run([2.0] * 300, trend(peak=1e-3), rate=5e-5)
    assert told == []


def test_few_trained_weights_explain_a_plateau() -> None:
    told, _ = run([5.5] * 200, trend(trained=0.01, peak=1e-3))
    assert [finding.likely for _, finding in told] == [Likely.FROZEN]


def test_updates_that_were_not_made_do_not_count() -> None:
    made = trend()
    for step in range(1, 200):
        assert made.see(replace_sound(step)) == ([], None)
    assert made.state()["recent"] == []


def replace_sound(step: int):
    return read(replace(report(step, loss=1e9), sound=False))


def test_gone_on_from_its_state_it_answers_as_if_never_interrupted() -> None:
    losses = np.concatenate([falling(150), 2.1 + 0.5 * (-1.0) ** np.arange(100), [2.0] * 200])
    for cut in (1, 16, 17, 120, 240):
        whole, first, second = trend(rise=9.0), trend(rise=9.0), trend(rise=9.0)
        answers = run(losses, whole)
        run(losses[:cut], first)
        second.restore(json.loads(json.dumps(first.state())))
        later = run(losses[cut:], second, start=cut + 1)
        assert later[0] == [(step, finding) for step, finding in answers[0] if step > cut]
        assert second.state() == whole.state()


def test_a_rise_that_passes_is_told_and_no_trouble() -> None:
    losses = np.concatenate([falling(160, noise=0.01), [3.6] * 16, [2.05] * 100])
    told, trouble = run(losses, trend(plateau=10_000))
    assert trouble is None and [(step, finding.kind) for step, finding in told] == [(176, "rising")]
