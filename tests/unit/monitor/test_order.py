"""Samples that come unshuffled, or again and again, are seen by their ids."""

from __future__ import annotations

from danlu.data.order import Permutation
from danlu.monitor.causes import Likely
from danlu.monitor.order import Order, in_line, rows
from danlu.monitor.reading import read
from tests.unit.monitor.reports import report


def told(batches: list[tuple[str, ...]]) -> list[str]:
    order = Order()
    findings = [found for step, ids in enumerate(batches, 1) for found in order.see(read(report(step, samples=ids)))]
    assert all(found.likely is Likely.DATA for found in findings)
    assert order.found is bool(findings)
    return [found.kind for found in findings]


def batches(numbers, size: int = 8) -> list[tuple[str, ...]]:
    numbers = list(numbers)
    return [
        tuple(f"a:b:0:{n}" for n in numbers[start : start + size]) for start in range(0, len(numbers) - size + 1, size)
    ]


def test_our_own_order_alarms_nobody() -> None:
    order = Permutation(4000, seed=1, name="a", epoch=0)
    assert told(batches(order[n] for n in range(4000))) == []


def test_rows_one_after_the_other_are_told_once() -> None:
    assert told(batches(range(4000))) == ["unshuffled"]


def test_the_same_rows_again_and_again_are_told_once() -> None:
    assert told(batches([5, 901, 77, 3, 18, 240, 11, 6] * 40)) == ["repeated"]


def test_ids_of_another_form_and_no_ids_say_nothing() -> None:
    assert told([("x", "y")] * 40) == told([()] * 40) == told([("", "")] * 40) == []


def test_what_an_id_says() -> None:
    assert rows(("web:0:12", "web:1:13", "odd")) == [("web", 12), ("web", 13)]
    assert in_line([("a", 1), ("a", 2), ("b", 3), ("b", 4)]) == 2 / 3
