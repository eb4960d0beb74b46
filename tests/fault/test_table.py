"""The table of faults names tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_test_that_the_table_names_is_there() -> None:
    rows = [line.split("|") for line in (HERE / "README.md").read_text().splitlines() if line.startswith("|")][2:]
    numbers = [int(row[1]) for row in rows if row[1].strip()]
    assert numbers == [*range(1, 12), 16, 17, 19, *range(21, 29)]
    for row in rows:
        named = re.findall(r"`((?:unit/\w+/|equal/)?test_\w+)`", row[4])
        assert named, row
        for name in named:
            place = HERE if "/" not in name else HERE.parent
            assert (place / f"{name}.py").is_file(), name
