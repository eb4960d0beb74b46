"""Layouts settle and refuse."""

from __future__ import annotations

import pytest

from danlu.compute.mesh import Parallel
from danlu.core.errors import InputError


@pytest.mark.parametrize(
    ("given", "size", "shard"), [((1, "auto"), 8, 8), ((2, "auto"), 8, 4), ((8, "auto"), 8, 1), ((1, 1), 1, 1)]
)
def test_auto_takes_the_rest(given: tuple, size: int, shard: int) -> None:
    settled = Parallel(replicate=given[0], shard=given[1]).over(size)
    assert (settled.shard, settled.ranks) == (shard, size)


@pytest.mark.parametrize(("replicate", "shard", "size"), [(3, "auto", 8), (2, 2, 8), (16, "auto", 8), (1, 3, 2)])
def test_what_does_not_make_the_world_is_refused_with_what_would(replicate: int, shard: int, size: int) -> None:
    with pytest.raises(InputError, match=rf"does not make {size} ranks"):
        Parallel(replicate=replicate, shard=shard).over(size)
