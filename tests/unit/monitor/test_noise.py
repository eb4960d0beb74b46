"""The gradient noise scale, where it is known; and what is said of it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from danlu.core.report import Report
from danlu.core.terms import Terms
from danlu.monitor.noise import BatchAdvice, NoiseScale


def test_both_unknowns_are_found_from_gradients_of_known_noise() -> None:
    """Gradients G + noise of covariance s^2 I: tr(S) = n s^2, so that B = n s^2 / |G|^2 = 32 tokens here."""
    source, numbers, spread = np.random.default_rng(1), 50, 0.8
    true = np.full(numbers, np.sqrt(1.0 / numbers))  # |G|^2 = 1
    made = NoiseScale(every=1)
    signals, spreads = [], []
    for _ in range(4000):
        rows = true + spread * source.standard_normal((16, numbers))
        small, large = (rows[:count].mean(axis=0) for count in (4, 16))
        made.see(small=float(small @ small), large=float(large @ large), part=4.0, whole=16.0)
        one = NoiseScale(every=1)
        one.see(small=float(small @ small), large=float(large @ large), part=4.0, whole=16.0)
        signals.append(one.facts()["noise_signal"])
        spreads.append(one.facts()["noise_spread"])
    assert np.mean(signals) == pytest.approx(1.0, rel=0.05)  # unbiased, each by itself
    assert np.mean(spreads) == pytest.approx(32.0, rel=0.02)
    assert made.facts()["noise_scale"] == pytest.approx(32.0, rel=0.9)  # of the last few measurements alone


def test_over_all_parts_of_a_batch_it_is_the_sample_variance() -> None:
    """Parts of b of N rows: the mean of |G_b|^2 is |G_N|^2 + s^2 (1/b - 1/N), s^2 being the variance with N - 1."""
    rows = np.random.default_rng(2).standard_normal((8, 30)) + 0.3
    whole = rows.mean(axis=0)
    spreads = []
    for part in itertools.combinations(range(8), 3):
        made = NoiseScale(every=1)
        mean = rows[list(part)].mean(axis=0)
        made.see(small=float(mean @ mean), large=float(whole @ whole), part=3, whole=8)
        spreads.append(made.facts()["noise_spread"])
    assert np.mean(spreads) == pytest.approx(rows.var(axis=0, ddof=1).sum(), rel=1e-12)


def test_exact_values_of_two_measurements_smoothed_apart() -> None:
    made = NoiseScale(every=5)
    assert [update for update in range(1, 12) if made.due(update)] == [5, 10]
    made.see(small=3.0, large=1.5, part=10.0, whole=40.0)  # |G|^2 = (60 - 30) / 30, tr(S) = 1.5 / (1/10 - 1/40)
    assert made.facts() == pytest.approx({"noise_signal": 1.0, "noise_spread": 20.0, "noise_scale": 20.0})
    made.see(small=8.0, large=5.0, part=10.0, whole=40.0)  # 4 and 40
    keep = 0.9 * 0.1 / (0.9 * 0.1 + 0.1)
    signal, spread = keep * 1 + (1 - keep) * 4, keep * 20 + (1 - keep) * 40
    assert made.facts() == pytest.approx(
        {"noise_signal": signal, "noise_spread": spread, "noise_scale": spread / signal}
    )
    other = NoiseScale(every=5)
    other.restore(made.state())
    assert other.facts() == made.facts()


def test_no_scale_is_given_while_noise_hides_the_gradient() -> None:
    made = NoiseScale(every=1)
    made.see(small=9.0, large=1.0, part=10.0, whole=40.0)  # |G|^2 would be negative
    assert "noise_scale" not in made.facts() and made.facts()["noise_signal"] < 0


def report(scale: float | None, batch: float = 1000.0) -> Report:
    return Report(
        step=1,
        losses=Terms(language=torch.tensor(1.0)),
        weights=Terms(language=torch.tensor(batch)),
        norm=torch.tensor(1.0),
        sound=True,
        learning_rate=0.1,
        tokens=int(batch),
        samples=(),
        seconds=0.1,
        extra={} if scale is None else {"noise_scale": scale},
    )


def said(scales: list[float | None]) -> list[tuple[int, str]]:
    advice = BatchAdvice()
    spoken = [(number, advice.advice(report(scale))) for number, scale in enumerate(scales, 1)]
    return [(number, text) for number, text in spoken if text]


def test_it_says_once_what_would_help_and_again_when_that_has_changed_for_good() -> None:
    found = said([None, *[10_000.0] * 12, 100.0, 10_000.0, *[100.0] * 6])
    assert [number for number, _ in found] == [11, 18]
    assert found[0][1] == (
        "The gradient noise scale is about 10,000 tokens, 10 times the batch of 1,000: a larger batch helps. Twice as "
        "large, about 45% fewer updates reach the same loss, for about 9% more tokens."
    )
    assert found[1][1] == (
        "The gradient noise scale is about 100 tokens, 0.1 times the batch of 1,000: a larger batch does not help. "
        "Half as large, the same loss takes about 45% fewer tokens."
    )


def test_near_the_batch_neither_helps_much() -> None:
    [(_, text)] = said([1000.0] * 30)
    assert "1 times the batch of 1,000: the batch is about right. Twice as large, about 25% fewer updates" in text
    assert text.endswith("for about 50% more tokens.")
