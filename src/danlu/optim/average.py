"""The exponential moving average of the weights (Polyak and Juditsky 1992): the noise of single updates left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from danlu.core.config import setting
from danlu.core.world import local

KIND = "average"  # before a weight's name in a checkpoint


@dataclass(frozen=True, kw_only=True)
class Average:
    """average <- decay * average + (1 - decay) * weights, after each update that was made."""

    decay: float = setting(0.999, "share of the average that an update keeps", at_least=0, below=1)
    warmup: bool = setting(
        True, "update u keeps at most (1 + u) / (10 + u), so that the first weights are soon forgotten"
    )

    def keeps(self, update: int) -> float:
        """The share of the average that stays at an update, from 1 on."""
        return min(self.decay, (1 + update) / (10 + update)) if self.warmup else self.decay


class Averages:
    """The average of every trained weight, in at least fp32, cut over ranks as the weight is.

    It begins as a weight is after its first update; one that never had a gradient has none. Elementwise, so that the
    layout cannot move it.
    """

    def __init__(self, settings: Average, named: Mapping[str, nn.Parameter]) -> None:
        self.settings = settings
        self.named = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        self.held: dict[str, Tensor] = {}

    @torch.no_grad()
    def follow(self, update: int, moved: Iterable[str]) -> None:
        """These weights have moved by this update: so have all averages."""
        fresh = [name for name in moved if name in self.named and name not in self.held]
        old = [name for name in self.named if name in self.held]
        if old:
            weights = [local(self.named[name]) for name in old]
            averages = [local(self.held[name]) for name in old]
            weights = [w if w.dtype == a.dtype else w.to(a.dtype) for w, a in zip(weights, averages)]
            torch._foreach_lerp_(averages, weights, 1 - self.settings.keeps(update))
        for name in fresh:
            weight = self.named[name].detach()
            self.held[name] = weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the weights are their averages; afterwards they are what they were, to the bit.

        Takes as much memory as the weights, which their gradients do not take between two updates.
        """
        kept = {name: parameter.detach().clone() for name, parameter in self.named.items()}
        try:
            self.settle()
            yield
        finally:
            with torch.no_grad():
                for name, weight in kept.items():
                    self.named[name].copy_(weight)

    @torch.no_grad()
    def settle(self) -> None:
        """The weights are their averages from now on; those without one stay."""
        for name, average in self.held.items():
            self.named[name].copy_(average)

    def state(self) -> dict[str, Tensor]:
        """`average/NAME` of every weight that has one."""
        return {f"{KIND}/{name}": value for name, value in self.held.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """The averages are those of a state; a weight that has none there begins anew with the next update."""
        self.held = {name: state[f"{KIND}/{name}"] for name in self.named if f"{KIND}/{name}" in state}
