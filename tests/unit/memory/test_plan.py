"""How many rows fit, by the closed formula."""

from __future__ import annotations

from dataclasses import replace

import pytest

from danlu.memory.plan import ROOM, Footprint, rows_that_fit

SMALL = Footprint(
    parameters=1000,
    vocab_size=10,
    hidden_size=4,
    intermediate_size=8,
    layers=2,
    query_size=4,
    key_size=2,
    sequence_length=16,
    product_bytes=2,
    weight_bytes=4,
)


def test_formula_by_hand() -> None:
    assert SMALL.state_bytes == 1000 * 4 * 4
    assert SMALL.row_bytes == 16 * (2 * ((8 + 4 + 24 + 12) * 2 + 12 * 4) + 4 * 4 * 4)
    assert SMALL.head_bytes == (2 * 1024 + 4) * 10 * 4
    assert SMALL.total(3, shards=4) == 4000 + SMALL.head_bytes + 3 * SMALL.row_bytes


@pytest.mark.parametrize("rows", [1, 7, 12, 32])
def test_the_largest_divisor_that_fits_is_taken(rows: int) -> None:
    for wanted in (d for d in range(1, rows + 1) if rows % d == 0):
        free = int(SMALL.total(wanted) / ROOM) + 1
        assert rows_that_fit(SMALL, rows=rows, free_bytes=free) == wanted


def test_one_row_where_nothing_fits() -> None:
    assert rows_that_fit(replace(SMALL, layers=10**6), rows=8, free_bytes=1) == 1
