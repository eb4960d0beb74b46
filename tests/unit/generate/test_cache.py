"""Keys and values are given back as they were put in, and never beyond the limit."""

from __future__ import annotations

import pytest
import torch

from danlu.core.errors import InputError
from danlu.generate.cache import KeyValues


def test_all_that_was_appended_comes_back_in_order() -> None:
    cache = KeyValues(limit=7)
    assert cache.length == 0
    whole = {layer: torch.randn(2, 2, 3, 7, 4, dtype=torch.float64) for layer in (0, 1)}  # keys and values of 7 tokens
    for start, stop in ((0, 4), (4, 5), (5, 7)):
        for layer, (keys, values) in whole.items():
            held = cache.append(layer, keys[:, :, start:stop], values[:, :, start:stop])
            assert torch.equal(held[0], keys[:, :, :stop])
            assert torch.equal(held[1], values[:, :, :stop])
        assert cache.length == stop


def test_memory_is_taken_once() -> None:
    cache = KeyValues(limit=9)
    places = {cache.append(3, *torch.zeros(2, 1, 1, 1, 2))[0].data_ptr() for _ in range(9)}
    assert len(places) == 1


def test_no_token_beyond_the_limit() -> None:
    cache = KeyValues(limit=4)
    cache.append(0, *torch.zeros(2, 1, 1, 3, 2))
    with pytest.raises(InputError, match="5 tokens do not fit a cache of 4"):
        cache.append(0, *torch.zeros(2, 1, 1, 2, 2))
    assert cache.length == 3
