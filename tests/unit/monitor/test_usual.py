"""What is usual, and what is far above it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from danlu.monitor.usual import LAST, LEAST, Usual, median, noise


def usual(**changes: float) -> Usual:
    return Usual(**({"window": 64, "ratio": 3.0, "deviations": 10.0} | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 2, 5, 64])
def test_the_median_is_numpys(count: int) -> None:
    values = np.random.default_rng(count).normal(size=count)
    assert median(list(values)) == pytest.approx(np.median(values), rel=1e-12)


def test_the_noise_of_a_normal_distribution_is_its_deviation_also_on_a_slope() -> None:
    drawn = np.random.default_rng(1).normal(scale=0.3, size=20_000)
    assert noise(list(drawn)) == pytest.approx(0.3, rel=0.03)
    assert noise(list(drawn + np.linspace(0, 500, 20_000))) == pytest.approx(0.3, rel=0.03)
    drawn[::10] = 50.0  # outliers widen it little: each spoils two differences of ten
    assert noise(list(drawn)) < 0.3 * 1.4
    assert noise([1.0]) == noise([]) == 0.0


def test_there_is_no_limit_before_enough_is_known() -> None:
    number = usual()
    for _ in range(LEAST - 1):
        number.add(2.0)
    assert number.limit == math.inf and number.median == pytest.approx(2.0)
    number.add(2.0)
    assert number.limit == pytest.approx(6.0)


def test_the_limit_is_the_larger_of_ratio_and_deviations() -> None:
    logs = np.random.default_rng(2).normal(loc=1.0, scale=0.4, size=64)
    number = usual(deviations=6.0)
    for log in logs:
        number.add(math.exp(log))
    spread = 1.4826 * np.median(np.abs(np.diff(logs))) / math.sqrt(2)
    assert math.log(number.limit) == pytest.approx(np.median(logs[-LAST:]) + 6 * spread, rel=1e-9)
    assert math.log(number.limit) > np.median(logs[-LAST:]) + math.log(3.0)


def test_a_number_that_is_not_above_zero_is_not_counted() -> None:
    number = usual()
    for value in (0.0, -1.0, math.nan, math.inf):
        number.add(value)
    assert number.state() == [] and number.median == math.inf


def test_given_back_its_state_it_goes_on_to_the_bit() -> None:
    values = np.exp(np.random.default_rng(3).normal(size=90))
    whole, first, second = usual(), usual(), usual()
    for value in values:
        whole.add(value)
    for value in values[:41]:
        first.add(value)
    second.restore(first.state())
    for value in values[41:]:
        second.add(value)
    assert (second.limit, second.median, second.state()) == (whole.limit, whole.median, whole.state())
    assert len(whole.state()) == 64
