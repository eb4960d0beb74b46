"""A rank's slice of a named whole tensor, and whether slices make whole tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from danlu.checkpoint.manifest import Part, misplaced


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A rank's contiguous slice of a named whole tensor: ``tensor`` stands at ``offset`` in a tensor of ``shape``.

    For a whole tensor the offset is all zeros. A tensor that several ranks hold is given by one of them only. still:
    nobody will write to it while it is held, so that saving it in the background needs no copy.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    still: bool = False

    @staticmethod
    def whole(tensor: Tensor) -> Piece:
        """A tensor that this rank holds all of."""
        return Piece(tensor=tensor, shape=tuple(tensor.shape), offset=(0,) * tensor.dim())


def uncovered(parts: Iterable[Part]) -> list[str]:
    """Each tensor that the slices do not cover exactly once, with what is wrong."""
    named: dict[str, list[Part]] = {}
    for part in parts:
        named.setdefault(part.name, []).append(part)
    problems = []
    for name, group in named.items():
        first = group[0]
        if any((p.shape, p.dtype) != (first.shape, first.dtype) for p in group):
            problems.append(f"{name}: ranks disagree about its shape or type")
        elif problem := next((m for p in group if (m := misplaced(p.shape, p.offset, p.local))), None):
            problems.append(f"{name}: {problem}")
        elif _overlap([p for p in group if math.prod(p.local)]):
            problems.append(f"{name}: parts of it were given twice")
        elif sum(math.prod(p.local) for p in group) != math.prod(first.shape):
            problems.append(f"{name}: parts of it were not given")
    return problems


def _overlap(parts: list[Part]) -> bool:
    """Whether any two slices share an element; quick where they differ along one dimension only, as shards do."""
    if len(parts) < 2:
        return False
    dims = range(len(parts[0].shape))
    cut = [d for d in dims if len({(p.offset[d], p.local[d]) for p in parts}) > 1]
    if len(cut) == 1:
        spans = sorted((p.offset[cut[0]], p.offset[cut[0]] + p.local[cut[0]]) for p in parts)
        return any(after[0] < before[1] for before, after in pairwise(spans))
    return any(
        all(a.offset[d] < b.offset[d] + b.local[d] and b.offset[d] < a.offset[d] + a.local[d] for d in dims)
        for i, a in enumerate(parts)
        for b in parts[:i]
    )
