from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from danlu.checkpoint.manifest import Part
from danlu.checkpoint.pieces import Piece, uncovered
from danlu.checkpoint.shard import Span

SPAN = Span(start=0, size=0, hash="")


def part(shape: tuple[int, ...], offset: tuple[int, ...], local: tuple[int, ...], dtype: str = "F32") -> Part:
    return Part(name="w", shape=shape, offset=offset, local=local, dtype=dtype, span=SPAN)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    found = []
    for _ in range(draw(st.integers(1, 4))):
        offset = tuple(draw(st.integers(0, n)) for n in shape)
        found.append((offset, tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offset))))
    return shape, found


@given(boxes())
def test_covered_means_that_every_element_is_given_once(case: tuple) -> None:
    shape, found = case
    counts = torch.zeros(shape, dtype=torch.int64)
    for offset, local in found:
        counts[tuple(slice(o, o + n) for o, n in zip(offset, local))] += 1
    problems = uncovered(part(shape, offset, local) for offset, local in found)
    if bool((counts > 1).any()):
        assert problems == ["w: parts of it were given twice"]
    elif bool((counts == 0).any()):
        assert problems == ["w: parts of it were not given"]
    else:
        assert problems == []


def test_a_grid_of_slices_covers() -> None:
    shape = (6, 4)
    grid = [part(shape, (3 * i, 2 * j), (3, 2)) for i in range(2) for j in range(2)]
    assert uncovered(grid) == []
    assert uncovered(grid[:3]) == ["w: parts of it were not given"]
    assert uncovered([*grid, grid[1]]) == ["w: parts of it were given twice"]


def test_ranks_must_agree_on_shape_and_type() -> None:
    rows = part((4,), (0,), (2,)), part((4,), (2,), (2,), dtype="BF16")
    assert uncovered(rows) == ["w: ranks disagree about its shape or type"]
    assert uncovered([part((4,), (3,), (2,))]) == ["w: a slice of [2] at [3] does not fit into [4]"]


def test_a_whole_tensor_is_one_piece() -> None:
    for tensor in (torch.zeros(2, 3), torch.tensor(1.0), torch.empty(0)):
        piece = Piece.whole(tensor)
        assert (piece.shape, piece.offset) == (tuple(tensor.shape), (0,) * tensor.dim())
        assert uncovered([part(piece.shape, piece.offset, piece.shape)]) == []
        assert math.prod(piece.shape) == tensor.numel()
