"""Faults of every kind at random, in one long run: it ends as the run that was left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fault.soak import Outcome, soak


def well(outcome: Outcome, faults: int) -> None:
    print(outcome)
    assert outcome.silent == [] and outcome.lost == 0, outcome
    assert outcome.hash == outcome.unhurt_hash != ""
    assert outcome.faults.total() == faults
    assert 0.3 < outcome.goodput <= 1


def test_a_few_faults(tmp_path: Path) -> None:
    well(soak(tmp_path, ranks=1, faults=6, seed=41), 6)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [1, 2])
def test_fifty_faults(tmp_path: Path, ranks: int) -> None:
    well(soak(tmp_path, ranks=ranks, faults=50, seed=42 + ranks), 50)
