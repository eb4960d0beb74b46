"""Gradients are kept within bounds: first their common norm, then each number of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from danlu.core.world import local


def clip(parameters: Iterable[nn.Parameter], norm: float, *, max_norm: float, max_value: float | None) -> None:
    """All gradients together have at most `max_norm`, then no number of them is beyond +- `max_value`.

    norm: the global norm as it is, over all ranks; max_norm 0 and max_value null leave things as they are. In this
    order both bounds hold in the end (cutting numbers off makes a norm smaller) and the norm is needed only once.
    """
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    if gradients and max_norm and norm > max_norm:
        torch._foreach_mul_(gradients, max_norm / (norm + 1e-6))
    if gradients and max_value is not None:
        torch._foreach_clamp_min_(gradients, -max_value)
        torch._foreach_clamp_max_(gradients, max_value)
