from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from danlu.checkpoint.keep import Checkpoint, doomed, room_needed
from danlu.core.errors import InputError

METRICS = st.dictionaries(st.integers(0, 40), st.none() | st.integers(0, 5).map(float), min_size=1, max_size=12)


@given(METRICS, st.integers(1, 4), st.integers(0, 3), st.data())
def test_what_stays(metrics: dict[int, float | None], keep_last: int, keep_best: int, data: st.DataObject) -> None:
    newest = data.draw(st.sampled_from(sorted(metrics)))
    gone = doomed(metrics, newest, Checkpoint(keep_last=keep_last, keep_best=keep_best))
    behind = [step for step in metrics if step <= newest]
    stay = [step for step in behind if step not in gone]
    assert gone == sorted(set(gone)) and set(gone) <= set(behind)
    assert newest in stay
    assert set(sorted(behind)[-keep_last:]) <= set(stay)
    measured = [metric for step in behind if (metric := metrics[step]) is not None]
    if measured and keep_best:
        assert min(m for s in stay if (m := metrics[s]) is not None) == min(measured)
    assert len(stay) <= keep_last + keep_best


@given(METRICS, st.sets(st.integers(0, 40)), st.integers(1, 4), st.integers(0, 3), st.data())
def test_what_a_run_left_with_displaces_nothing(
    metrics: dict[int, float | None], extra: set[int], keep_last: int, keep_best: int, data: st.DataObject
) -> None:
    """Of those that were due stay the same as if the others had never been; of the others only the newest of all."""
    newest = data.draw(st.sampled_from(sorted(metrics)))
    settings = Checkpoint(keep_last=keep_last, keep_best=keep_best)
    stay = {s for s in metrics if s <= newest} - set(doomed(metrics, newest, settings, extra=extra))
    due = {step: metric for step, metric in metrics.items() if step not in extra and step <= newest}
    assert stay & extra == {newest} & extra
    assert stay - extra == (set(due) - set(doomed(due, max(due), settings)) if due else set())


def test_those_left_with_go_once_a_newer_one_stands() -> None:
    two = Checkpoint(keep_last=2, keep_best=0)
    assert doomed(dict.fromkeys([40, 50, 60, 67]), 67, two, extra=[67]) == [40]
    assert doomed(dict.fromkeys([50, 60, 67, 68]), 68, two, extra=[67, 68]) == [67]
    assert doomed(dict.fromkeys([50, 60, 68, 70]), 70, two, extra=[68]) == [50, 68]


def test_of_equal_losses_the_newer_is_kept() -> None:
    assert doomed({1: 2.0, 2: 2.0, 3: None, 4: None}, 4, Checkpoint(keep_last=1, keep_best=1)) == [1, 3]


def test_keep_all() -> None:
    assert doomed(dict.fromkeys(range(9)), 8, Checkpoint(keep_last=-1)) == []
    assert room_needed(7, Checkpoint(keep_last=-1)) is None
    assert room_needed(7, Checkpoint(keep_last=2, keep_best=1)) == 35


@pytest.mark.parametrize("value", [0, -2])
def test_keeping_nothing_is_refused(value: int) -> None:
    with pytest.raises(InputError, match=f"keep_last: {value} would keep nothing"):
        Checkpoint(keep_last=value)
