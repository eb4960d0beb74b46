"""The learning rate of each update, as a share of its peak.

Updates are counted from 1 to `total`. Warm-up is linear and never zero: update u of w warm-up updates runs at u / w.
After it the rate falls so that the last update runs exactly at `final_ratio` (other tools reach it one update after
the last). A schedule is a pure function of the update's number: accumulation, ranks, a growing batch and resumption
cannot move it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from danlu.core.config import setting


@dataclass(frozen=True, kw_only=True)
class Warmed(ABC):
    """What all schedules share: a kind, and linear warm-up to the peak."""

    kind: str
    warmup_steps: int = setting(0, "updates of linear warm-up", at_least=0)

    def share(self, update: int, total: int) -> float:
        """The share of the peak rate at an update, 1 to total."""
        if update <= self.warmup_steps:
            return update / self.warmup_steps
        return self.after(update, total)

    @abstractmethod
    def after(self, update: int, total: int) -> float:
        """The share at an update after warm-up."""

    def done(self, update: int, total: int) -> float:
        """How far the fall has come: 0 at the end of warm-up (or the first update), 1 at the last update."""
        start = max(self.warmup_steps, 1)
        return min(1.0, (update - start) / (total - start)) if total > start else 1.0


@dataclass(frozen=True, kw_only=True)
class Cosine(Warmed):
    """Half a cosine from the peak to `final_ratio` of it (Loshchilov and Hutter 2017, without restarts)."""

    kind: Literal["cosine"] = "cosine"
    final_ratio: float = setting(0.1, "share of the peak that the last update runs at", at_least=0, at_most=1)

    def after(self, update: int, total: int) -> float:
        """final + (1 - final) (1 + cos(pi done)) / 2."""
        return _between(self.final_ratio, _cosine(self.done(update, total)))


@dataclass(frozen=True, kw_only=True)
class Linear(Warmed):
    """A straight line from the peak to `final_ratio` of it."""

    kind: Literal["linear"] = "linear"
    final_ratio: float = setting(0.0, "share of the peak that the last update runs at", at_least=0, at_most=1)

    def after(self, update: int, total: int) -> float:
        """1 - (1 - final) done."""
        return 1 - (1 - self.final_ratio) * self.done(update, total)


@dataclass(frozen=True, kw_only=True)
class Polynomial(Warmed):
    """A power of what is left, from the peak to `final_ratio` of it; power 1 is a straight line."""

    kind: Literal["polynomial"] = "polynomial"
    power: float = setting(2.0, "the power of what is left of the run", above=0)
    final_ratio: float = setting(0.0, "share of the peak that the last update runs at", at_least=0, at_most=1)

    def after(self, update: int, total: int) -> float:
        """final + (1 - final) (1 - done)^power."""
        return _between(self.final_ratio, (1 - self.done(update, total)) ** self.power)


@dataclass(frozen=True, kw_only=True)
class Stable(Warmed):
    """Warm-up, stable, decay (MiniCPM, arXiv:2404.06395): the peak until the last updates, in which the rate falls.

    A run can be made longer as long as its decay has not begun: until then the rate does not know where the run ends.
    """

    kind: Literal["wsd"] = "wsd"
    decay_ratio: float = setting(0.1, "share of the updates in which the rate falls", at_least=0, at_most=1)
    decay_steps: int | None = setting(None, "updates in which the rate falls, in place of decay_ratio", at_least=0)
    shape: Literal["linear", "sqrt", "cosine"] = setting(
        "sqrt", "how it falls: linear, sqrt (1 - sqrt(done), arXiv:2405.18392) or half a cosine"
    )
    final_ratio: float = setting(0.0, "share of the peak that the last update runs at", at_least=0, at_most=1)

    def falling(self, total: int) -> int:
        """Updates in which the rate falls, the last of them at `final_ratio`; what warm-up leaves at most."""
        asked = self.decay_steps if self.decay_steps is not None else round(self.decay_ratio * total)
        return max(0, min(asked, total - self.warmup_steps))

    def after(self, update: int, total: int) -> float:
        """1 while stable; then final + (1 - final) times 1 - done, 1 - sqrt(done) or (1 + cos(pi done)) / 2."""
        falling = self.falling(total)
        if update <= total - falling:
            return 1.0
        done = min(1.0, (update - (total - falling)) / falling)
        left = {"linear": 1 - done, "sqrt": 1 - math.sqrt(done), "cosine": _cosine(done)}[self.shape]
        return _between(self.final_ratio, left)


@dataclass(frozen=True, kw_only=True)
class InverseSqrt(Warmed):
    """1 / sqrt of the updates since warm-up (Vaswani et al. 2017): the rate does not know where the run ends."""

    kind: Literal["inverse_sqrt"] = "inverse_sqrt"
    timescale: int | None = setting(
        None, "updates until the rate is 1 / sqrt 2 of the peak; null: as many as warm-up has, or 10000", at_least=1
    )

    def after(self, update: int, total: int) -> float:
        """sqrt(timescale / (timescale + updates since warm-up))."""
        timescale = self.timescale or self.warmup_steps or 10_000
        return math.sqrt(timescale / (timescale + update - self.warmup_steps))


@dataclass(frozen=True, kw_only=True)
class Constant(Warmed):
    """The peak all along, after warm-up."""

    kind: Literal["constant"] = "constant"

    def after(self, update: int, total: int) -> float:
        """1."""
        return 1.0


Schedule = Cosine | Linear | Constant | Stable | InverseSqrt | Polynomial


def _between(final: float, left: float) -> float:
    """The share where `left` of the way down from 1 to `final` is still to go."""
    return final + (1 - final) * left


def _cosine(done: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * done))
