from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danlu.data.mixture import Mixture

weights = st.lists(st.decimals("0.001", "1000", places=3).map(float), min_size=1, max_size=7)


@settings(deadline=None, max_examples=50)
@given(weights)
def test_quotas_hold_at_every_sample(given_weights: list[float]) -> None:
    """The bound |count_j(n) - w_j n| < sources, checked at each n, and each source is counted through without a gap."""
    mixture = Mixture(given_weights)
    total = sum(Fraction(str(weight)) for weight in given_weights)
    counts = [0] * len(given_weights)
    for sample in range(200):
        source, number = mixture.place(sample)
        assert number == counts[source]
        counts[source] += 1
        assert mixture.counts(sample + 1) == counts
        for count, weight in zip(counts, given_weights, strict=True):
            assert abs(count - Fraction(str(weight)) / total * (sample + 1)) < max(len(counts), 2)


@settings(deadline=None)
@given(weights, st.integers(0, 2**60))
def test_any_sample_is_found_at_once(given_weights: list[float], sample: int) -> None:
    """Far out too: a sample's place is what the counts before and after it say."""
    mixture = Mixture(given_weights)
    before, after = mixture.counts(sample), mixture.counts(sample + 1)
    grown = [number for number, (a, b) in enumerate(zip(before, after, strict=True)) if b > a]
    assert sum(after) == sample + 1
    assert (grown, before[grown[0]]) == ([mixture.place(sample)[0]], mixture.place(sample)[1])


def test_decimal_text_is_exact() -> None:
    """0.1 + 0.2 + 0.7 in floats would drift; in tenths, every ten samples hold 1, 2 and 7, for ever."""
    mixture = Mixture([0.1, 0.2, 0.7])
    assert mixture.counts(10**15) == [10**14, 2 * 10**14, 7 * 10**14]


@pytest.mark.parametrize("bad", [[], [0.0], [1, -1]])
def test_weights_without_sense_are_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="above zero"):
        Mixture(bad)
