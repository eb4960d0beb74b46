"""How fast it goes, how long it will take, and where the time went: from a clock that stops during pauses."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from danlu.core.device import Gauges
from danlu.core.report import Report

WINDOW = 50  # updates over which rates are taken
SETTLING = 2  # first updates of a process, slower than the rest (kernels are chosen, memory is taken)


@dataclass(frozen=True, slots=True)
class Lap:
    """One update: wall-clock seconds since the one before (pauses left out), and what the report said of it."""

    seconds: float
    step_seconds: float
    data_seconds: float
    tokens: int


class Speed:
    """Rates over the last updates of this process. What happened before a resume, or in a pause, is not in them.

    total_steps   updates of the whole run
    every         updates between two pauses of a kind, so that the time that is left counts those to come
    clock         seconds that never go back
    """

    def __init__(
        self,
        *,
        total_steps: int,
        start_step: int = 0,
        every: Mapping[str, int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.total_steps = total_steps
        self.step = start_step
        self.every = dict(every or {})
        self.paused: dict[str, tuple[int, float]] = {}  # kind of pause: how often, and seconds in all
        self.laps = 0
        self.tokens = 0
        self.seconds = 0.0
        self._clock = clock
        self._window: deque[Lap] = deque(maxlen=WINDOW + SETTLING)
        self._count, self._sum = 0, Lap(0.0, 0.0, 0.0, 0)
        self._mark: float | None = None
        self._out = 0.0  # seconds paused since the mark
        self._depth = 0

    def lap(self, report: Report) -> Lap:
        """An update is over. The first of a process has nothing to be measured from but its own report."""
        now = self._clock()
        wall = report.seconds + report.data_seconds if self._mark is None else now - self._mark - self._out
        lap = Lap(max(wall, 1e-9), report.seconds, report.data_seconds, report.tokens)
        self._mark, self._out = now, 0.0
        self._window.append(lap)
        self.laps += 1
        self.step = report.step
        self.tokens += lap.tokens
        self.seconds += lap.seconds
        self._add_up()
        return lap

    @contextmanager
    def pause(self, kind: str) -> Iterator[None]:
        """What is done inside is no training: its time counts as this kind of pause. Pauses may stand in pauses."""
        start = self._clock()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                took = self._clock() - start
                self._out += took
                times, seconds = self.paused.get(kind, (0, 0.0))
                self.paused[kind] = (times + 1, seconds + took)

    @property
    def measured(self) -> int:
        """How many updates the rates are taken over: the last ones, without the process's first if there are enough."""
        return self._count

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens a second on all ranks together; None before the first update."""
        return self._sum.tokens / self._sum.seconds if self._count else None

    @property
    def seconds_left(self) -> float | None:
        """Time to the end: updates at the present pace, and the pauses known to come; None before the first update."""
        if not self._count:
            return None
        seconds = (self.total_steps - self.step) * self._sum.seconds / self._count
        for kind, interval in self.every.items():
            times, spent = self.paused.get(kind, (0, 0.0))
            if times and interval:
                seconds += (self.total_steps // interval - self.step // interval) * spent / times
        return seconds

    @property
    def data_wait(self) -> float | None:
        """Share of the time, 0 to 1, that the device waited for data."""
        return self._sum.data_seconds / self._sum.seconds if self._count else None

    @property
    def overhead(self) -> float | None:
        """Share of the time, 0 to 1, that was neither step, nor data, nor pause: what the loop itself costs."""
        if not self._count:
            return None
        return max(0.0, 1 - (self._sum.step_seconds + self._sum.data_seconds) / self._sum.seconds)

    def _add_up(self) -> None:
        """Added up anew each time, so that no rounding error gathers over a long run."""
        skip = max(0, SETTLING - (self.laps - len(self._window))) if len(self._window) > 2 * SETTLING else 0
        laps = list(self._window)[skip:][-WINDOW:]
        self._count = len(laps)
        self._sum = Lap(
            sum([lap.seconds for lap in laps]),
            sum([lap.step_seconds for lap in laps]),
            sum([lap.data_seconds for lap in laps]),
            sum([lap.tokens for lap in laps]),
        )


def mfu(tokens_per_second: float | None, *, flops_per_token: float | None, peak_flops: float | None) -> float | None:
    """Model FLOP/s utilisation, 0 to 1: the model's own arithmetic against the peak of all devices together.

    None where something is not known, or where the share is above 1, so that the peak cannot be right.
    """
    if not tokens_per_second or not flops_per_token or not peak_flops:
        return None
    share = tokens_per_second * flops_per_token / peak_flops
    return share if share <= 1 else None


class DataWait:
    """Says once, in a sentence with what to set, that the device waits for data."""

    def __init__(self, *, bound: float, workers: int, prefetch: int, cores: int, least_laps: int = 20):
        self.bound, self.workers, self.prefetch, self.cores = bound, workers, prefetch, cores
        self.least_laps = least_laps
        self.said = False

    def advice(self, speed: Speed) -> str | None:
        """The sentence, the first time that the share over the last updates is above the bound; else None."""
        share = speed.data_wait
        if self.said or speed.laps < self.least_laps + SETTLING or share is None or share <= self.bound:
            return None
        self.said = True
        more = max(self.workers + 1, min(self.cores, 2 * self.workers))
        what = (
            f"set data.workers to {more} (now {self.workers}; this machine has {self.cores} cores)"
            if more <= self.cores
            else f"data.workers is {self.workers} on {self.cores} cores, so put the data on a faster disk"
        )
        return (
            f"The device waited for data during {share:.0%} of the last {speed.measured} updates "
            f"(bound: {self.bound:.0%}): {what}, or data.prefetch to {max(2, 2 * self.prefetch)} (now {self.prefetch})."
        )


@dataclass(frozen=True, slots=True)
class Sample:
    """What the gauges showed last; what cannot be read is None. Shares 0 to 1, bytes, watts."""

    use: float | None = None
    watts: float | None = None
    resident: int | None = None
    held: int | None = None


class Sampler:
    """Reads the gauges once a second in a thread of its own, and adds up the energy."""

    def __init__(self, gauges: Gauges, *, seconds: float = 1.0):
        self.last = Sample(resident=gauges.resident())
        self.peak_resident = self.last.resident or 0
        self.joules: float | None = None
        self._gauges, self._seconds = gauges, seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="danlu-gauges", daemon=True)

    def start(self) -> None:
        """The thread reads from now on."""
        self._thread.start()

    def stop(self) -> None:
        """The thread has ended, or is left behind if a gauge hangs."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2)

    def _run(self) -> None:
        before = time.monotonic()
        while not self._stop.wait(self._seconds):
            gauges = self._gauges
            self.last = Sample(gauges.use(), gauges.watts(), gauges.resident(), gauges.held())
            now = time.monotonic()
            self.peak_resident = max(self.peak_resident, self.last.resident or 0)
            if self.last.watts is not None:
                self.joules = (self.joules or 0.0) + self.last.watts * (now - before)
            before = now
