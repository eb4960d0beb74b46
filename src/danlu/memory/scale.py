"""The loss scale of fp16 (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2), which finds its size by itself.

fp16 has no number between 0 and 6e-8 and none above 65504. The loss is multiplied by a power of two before the
backward, and the gradients of the weights, which are fp32, are divided by it after: both are exact, so that a scale
changes nothing but what would have been lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from danlu.core.config import setting
from danlu.core.errors import InputError
from danlu.core.world import local

SMALLEST = 1.0  # below it, scaling would only lose


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """How the loss scale of fp16 moves: doubled after many updates without an overflow, halved by each overflow."""

    start: float = setting(65536.0, "the first scale, a power of two", at_least=1)
    growth_interval: int = setting(2000, "sound updates in a row after which it is doubled", at_least=1)
    largest: float = setting(16777216.0, "the most that it grows to, a power of two", at_least=1)

    def __post_init__(self) -> None:
        for name in ("start", "largest"):
            value = getattr(self, name)
            if math.isfinite(value) and value > 0 and math.frexp(value)[0] != 0.5:
                raise InputError(
                    f"memory.loss_scale.{name}: {value:g} is no power of two, by which alone nothing is rounded; "
                    f"{2.0 ** round(math.log2(value)):g} would do"
                )
        if self.start > self.largest:
            raise InputError(f"memory.loss_scale.start: {self.start:g} is more than largest, {self.largest:g}")


class Scale:
    """The scale of now, and how many updates in a row it was good for. Moved only by what all ranks agree on."""

    def __init__(self, settings: LossScale) -> None:
        self.settings = settings
        self.value = settings.start
        self.sound = 0

    def settle(self, sound: bool) -> None:
        """An update was sound, or its numbers were not finite: the scale of the next one."""
        if not sound:
            self.value, self.sound = max(self.value / 2, SMALLEST), 0
            return
        self.sound += 1
        if self.sound == self.settings.growth_interval:
            self.value, self.sound = min(self.value * 2, self.settings.largest), 0

    def unscale(self, weights: Iterable[nn.Parameter]) -> None:
        """Gradients are what they would be at a scale of 1; what overflowed stays not finite."""
        gradients = [local(weight.grad) for weight in weights if weight.grad is not None]
        if gradients and self.value != 1:
            torch._foreach_mul_(gradients, 1 / self.value)

    def state(self) -> dict[str, float]:
        """Enough to go on."""
        return {"loss_scale": self.value, "sound": self.sound}

    def restore(self, state: Mapping[str, float]) -> None:
        """The scale goes on from there. Raises KeyError where the state is not that of a scale."""
        self.value, self.sound = float(state["loss_scale"]), int(state["sound"])
