"""The learning rate of each update, as a share of its peak.

Updates are counted from 1 to `total`. Warm-up is linear and never zero: update u of w warm-up updates runs at u / w.
After it the rate falls so that the last update runs exactly at `final_ratio`. A schedule is a pure function of the
update's number: accumulation, ranks and resumption cannot move it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from danlu.core.config import setting


@dataclass(frozen=True, kw_only=True)
class Cosine:
    """Half a cosine from the peak to `final_ratio` of it (Loshchilov and Hutter 2017, without restarts)."""

    kind: Literal["cosine"] = "cosine"
    warmup_steps: int = setting(0, "updates of linear warm-up", at_least=0)
    final_ratio: float = setting(0.1, "share of the peak that the last update runs at", at_least=0, at_most=1)

    def share(self, update: int, total: int) -> float:
        """The share of the peak rate at an update, 1 to total."""
        if update <= self.warmup_steps:
            return update / self.warmup_steps
        return self.final_ratio + (1 - self.final_ratio) * 0.5 * (1 + math.cos(math.pi * _done(self, update, total)))


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A straight line from the peak to `final_ratio` of it."""

    kind: Literal["linear"] = "linear"
    warmup_steps: int = setting(0, "updates of linear warm-up", at_least=0)
    final_ratio: float = setting(0.0, "share of the peak that the last update runs at", at_least=0, at_most=1)

    def share(self, update: int, total: int) -> float:
        """The share of the peak rate at an update, 1 to total."""
        if update <= self.warmup_steps:
            return update / self.warmup_steps
        return 1 - (1 - self.final_ratio) * _done(self, update, total)


@dataclass(frozen=True, kw_only=True)
class Constant:
    """The peak all along, after warm-up."""

    kind: Literal["constant"] = "constant"
    warmup_steps: int = setting(0, "updates of linear warm-up", at_least=0)

    def share(self, update: int, total: int) -> float:
        """The share of the peak rate at an update, 1 to total."""
        return min(1.0, update / self.warmup_steps) if self.warmup_steps else 1.0


Schedule = Cosine | Linear | Constant


def _done(schedule: Cosine | Linear, update: int, total: int) -> float:
    """How far the fall has come: 0 at the end of warm-up (or the first update), 1 at the last update."""
    start = max(schedule.warmup_steps, 1)
    return min(1.0, (update - start) / (total - start)) if total > start else 1.0
