"""How many rows each update has, against counting update by update."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from danlu.core.config import load
from danlu.core.errors import InputError
from danlu.data.sizes import Ramp, Sizes, sizes


def played(made: Sizes, updates: int) -> list[int]:
    samples, seen = 0, []
    for _ in range(updates):
        seen.append(made.at(samples))
        samples += seen[-1]
    return seen


def test_without_a_ramp_all_are_alike() -> None:
    made = sizes(12)
    assert played(made, 4) == [12] * 4 and made.samples(7) == 84 and made.updates(85) == 8 and made.largest == 12


def test_a_ramp_over_updates() -> None:
    assert played(sizes(32, Ramp(from_=8, steps=6)), 9) == [8, 8, 16, 16, 24, 24, 32, 32, 32]
    assert played(sizes(32, Ramp(from_=8, steps=7)), 9) == [8, 8, 8, 16, 16, 24, 24, 32, 32]
    assert played(sizes(32, Ramp(from_=8, steps=1)), 3) == [8, 32, 32]  # sizes that have no turn are left out
    assert played(sizes(32, Ramp(from_=32, steps=5)), 3) == [32, 32, 32]


def test_a_ramp_over_tokens_turns_after_so_many_were_read() -> None:
    """48 rows of 10 tokens in three thirds: sizes turn at the first update after 16, 32 and 48 rows."""
    made = sizes(32, Ramp(from_=8, tokens=480), sequence_length=10)
    assert played(made, 6) == [8, 8, 16, 24, 32, 32]
    assert [made.at(samples) for samples in (0, 15, 16, 31, 32, 55, 56)] == [8, 8, 16, 16, 24, 24, 32]


@given(
    start=some.integers(1, 6),
    levels=some.integers(1, 9),
    over=some.integers(1, 60),
    length=some.integers(1, 4),
    tokens=some.booleans(),
    updates=some.integers(0, 120),
)
def test_counting_by_formula_is_counting_one_by_one(
    start: int, levels: int, over: int, length: int, tokens: bool, updates: int
) -> None:
    ramp = Ramp(from_=start, tokens=over * 7) if tokens else Ramp(from_=start, steps=over)
    made = sizes(start * levels, ramp, sequence_length=length)
    seen = played(made, updates + 1)
    assert seen == sorted(seen) and seen[0] >= start and made.largest == start * levels
    samples = sum(seen[:updates])
    assert made.samples(updates) == samples
    assert made.updates(samples) == updates
    assert made.updates(samples + 1) == updates + 1
    if not tokens:
        assert made.at(made.samples(over)) == start * levels


def test_what_cannot_be_is_refused(tmp_path) -> None:
    with pytest.raises(InputError, match=r"batch.ramp.from is 8, which does not divide the 20 rows .* 4 would do"):
        sizes(20, Ramp(from_=8, steps=3))
    for text in ("from: 8", "{from: 8, steps: 3, tokens: 1M}"):
        with pytest.raises(InputError, match="give either steps or tokens"):
            load(Ramp, text, file=tmp_path / "a.yaml")
    assert load(Ramp, "{from: 8, tokens: 1M}", file=tmp_path / "a.yaml") == Ramp(from_=8, tokens=1_000_000)
