"""Which rank failed first, and what is said of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest

from danlu.core.errors import Failure, Interrupted
from danlu.launch import local


@dataclass
class Ended:
    exitcode: int


@pytest.mark.parametrize(
    ("noticed", "first"),
    [
        ([(1, -9), (0, -15)], 1),
        ([(0, -15), (1, -9)], 1),  # noticed together, one was only ended with the others
        ([(3, 1), (0, 1)], 3),
        ([(0, -15)], 0),
    ],
)
def test_the_first_is_the_one_noticed_first_that_was_not_ended_with_the_others(
    noticed: list[tuple[int, int]], first: int
) -> None:
    failures = cast(Any, {rank: Ended(code) for rank, code in noticed})
    assert local._first(failures)[0] == first


@pytest.mark.parametrize("code", [2, 3, 75])
def test_codes_that_say_all_are_passed_on_in_silence(code: int) -> None:
    assert local._code(1, code, local._Told()) == code


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (-9, r"^rank 1 was killed by signal 9 \(SIGKILL; most likely memory ran out\), and the other ranks were ended"),
        (-7, r"^rank 1 was killed by signal 7 \(SIGBUS\)"),
        (1, "^rank 1 failed first, with exit code 1: its message stands above"),
    ],
)
def test_what_a_rank_could_not_say_is_said(code: int, says: str) -> None:
    with pytest.raises(Failure, match=says) as raised:
        local._code(1, code, local._Told())
    assert raised.value.code == 1


def test_one_signal_that_comes_twice_is_one() -> None:
    told = local._Told()
    told.hear(15, None)
    told.hear(15, None)
    assert told.by == [15]
    told.when -= 0.2
    told.hear(2, None)
    assert told.by == [15, 2]


def test_ranks_that_were_told_before_they_listened_are_interrupted() -> None:
    told = local._Told()
    told.hear(15, None)
    with pytest.raises(Interrupted) as raised:
        local._code(0, -15, told)
    assert raised.value.code == 75
