"""Named sums: a loss is the ratio of two of them, name by name."""

from __future__ import annotations

import torch
from torch import Tensor


class Terms(dict[str, Tensor]):
    """Named scalar sums, each a 0-d tensor.

    An objective counts (how much each term weighs, before the forward) and sums (each term, after it); the loss that
    is trained is ``sum / count``, name by name, added up. Counts are taken over the whole global batch, so that how the
    batch is cut into micro-batches and ranks changes nothing.
    """

    def __add__(self, other: Terms) -> Terms:
        """The sum, name by name; a name that only one side has is kept as it is."""
        both = Terms(self)
        for name, value in other.items():
            both[name] = both[name] + value if name in both else value
        return both

    def __truediv__(self, weights: Terms) -> Terms:
        """Each term divided by its weight; a term that weighs nothing is exactly zero.

        Weights may be fractional, so they are not clamped to one: the division is made only where the weight is
        positive.
        """
        ratios = Terms()
        for name, value in self.items():
            some = weights[name] > 0
            ratios[name] = value / torch.where(some, weights[name], torch.ones_like(weights[name])) * some
        return ratios

    def total(self) -> Tensor:
        """The terms added up, in the order of their names: a 0-d tensor."""
        return torch.stack([self[n] for n in sorted(self)]).sum()

    def zeros(self) -> Terms:
        """The same names, each zero in floating point: what a rank that computes no loss contributes."""
        return Terms({n: torch.zeros_like(v, dtype=_floating(v.dtype)) for n, v in self.items()})

    def detach(self) -> Terms:
        """The same values, cut from the graph."""
        return Terms({n: v.detach() for n, v in self.items()})


def _floating(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_floating_point else torch.get_default_dtype()
