"""What is usual for a number of this run, by its median and the median difference of neighbours, and what is far above.

Both bear outliers among fewer than a quarter of the values, and outliers are kept out besides, so that one spike hides
no other. Differences of neighbours, unlike those from the median, are not widened by a loss that falls fast, as at the
start. Losses and norms are looked at on a log scale, where their spread is alike at every height.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from itertools import pairwise

DEVIATION = 1.4826  # standard deviations of a normal distribution in one median absolute deviation
LEAST = 20  # values before anything can be called unusual
LAST = 24  # values that the median is taken over; the spread is taken over all


class Usual:
    """The last values above zero. ``limit``: what is above it is a spike; infinite until there are enough values.
    ``median``: of the very last ones, so that it follows a loss that falls fast.

    A spike is at once ``ratio`` times the median and ``deviations`` robust standard deviations above it.
    """

    def __init__(self, *, window: int, ratio: float, deviations: float) -> None:
        self.ratio, self.deviations = math.log(ratio), deviations
        self.limit = self.median = math.inf
        self._logs: deque[float] = deque(maxlen=window)

    def add(self, value: float) -> None:
        """One more usual value; one that is not above zero, or not finite, is not counted."""
        if not 0 < value < math.inf:
            return
        self._logs.append(math.log(value))
        self._settle()

    def state(self) -> list[float]:
        """The logs of the values, oldest first."""
        return list(self._logs)

    def restore(self, state: Iterable[float]) -> None:
        """The values are those."""
        self._logs.clear()
        self._logs.extend(state)
        self._settle()

    def _settle(self) -> None:
        if not self._logs:
            self.limit = self.median = math.inf
            return
        middle = median(list(self._logs)[-LAST:])
        self.median = math.exp(middle)
        if len(self._logs) < LEAST:
            self.limit = math.inf
            return
        above = middle + max(self.ratio, self.deviations * noise(list(self._logs)))
        self.limit = math.exp(above) if above < 700 else math.inf


def median(values: Iterable[float]) -> float:
    """The middle one, or the mean of the two in the middle; there must be one."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def noise(values: list[float]) -> float:
    """The standard deviation of values round whatever line they follow, from the differences of neighbours.

    J. Rice, "Bandwidth choice for nonparametric regression", 1984; with the median in place of the mean square.
    """
    if len(values) < 2:
        return 0.0
    return DEVIATION * median([abs(b - a) for a, b in pairwise(values)]) / math.sqrt(2)
