"""How many rows fit."""

from __future__ import annotations

import pytest

from danlu.memory.plan import rows_that_fit


@pytest.mark.parametrize("rows", [1, 7, 12, 32])
def test_the_largest_divisor_that_fits_is_taken(rows: int) -> None:
    for wanted in (d for d in range(1, rows + 1) if rows % d == 0):
        assert rows_that_fit(lambda size: 100 + 10 * size, rows=rows, free_bytes=100 + 10 * wanted) == wanted


def test_one_row_where_nothing_fits() -> None:
    assert rows_that_fit(lambda size: 100, rows=8, free_bytes=1) == 1
