"""A trace of some updates for Perfetto (ui.perfetto.dev), and a page of text: what took the time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from danlu.core.config import setting
from danlu.core.paths import write_whole

TOP = 20  # operators listed
# How the names of what ranks send to each other begin: gloo's and NCCL's work, not the calls that ask for it.
SENT = ("gloo:", "nccl:", "ncclKernel", "ncclDevKernel")

Span = tuple[float, float]  # microseconds, from and to


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Which updates are traced; each rank writes profile/rank-0.json.gz and profile/rank-0.txt of its own."""

    from_step: int = setting(10, "the first update that is traced; early ones also hold what happens once", at_least=1)
    steps: int = setting(3, "updates in a row that are traced; a trace takes some MB an update", at_least=1)
    shapes: bool = setting(False, "tell operators of other shapes apart")

    def missed(self, *, done: int, total: int) -> str:
        """Why a run that stands after update `done` of `total` will write no trace; empty where it will."""
        last = self.from_step + self.steps - 1
        if done >= self.from_step:
            return f"monitor.profile: nothing is traced: the run is past update {self.from_step} already"
        if last > total:
            return (
                f"monitor.profile: nothing is traced: updates {self.from_step} to {last} are asked for, and the run "
                f"ends after update {total}"
            )
        return ""


class Tracer:
    """Traces the updates that ``settings`` name, on every rank; each is made inside ``update``.

    A run that goes on behind them traces nothing. What there is to tell, also that the disk refused, goes to ``tell``.
    """

    def __init__(
        self, settings: Profile, folder: Path, rank: int, device: torch.device, tell: Callable[[str], None]
    ) -> None:
        self._settings, self._folder, self._rank, self._device = settings, folder, rank, device
        self._tell = tell
        self._running: profile | None = None
        self._waited = 0.0  # of what is traced, as are
        self._first = self._last = 0

    @contextmanager
    def update(self, step: int, waited: Callable[[], float]) -> Iterator[None]:
        """Inside, this update is made; ``waited``: seconds that it waited for data, asked afterwards.

        A run that went back while it was traced is traced anew from there: all that is traced was made in a row.
        """
        again = self._running is not None and step != self._last + 1
        if again:
            self.close()
        if again or (self._running is None and step == self._settings.from_step):
            self._first, self._waited = step, 0.0
            kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self._device.type == "cuda")
            self._running = profile(activities=kinds, record_shapes=self._settings.shapes, acc_events=True)
            self._running.start()
        yield
        self._last = step
        if self._running is not None:
            self._waited += waited()
            if step - self._first + 1 >= self._settings.steps:
                self._tell(self._write(step - self._first + 1))

    def close(self) -> None:
        """Nothing is traced any more; a trace that was not finished is dropped."""
        if self._running is not None:
            self._running.stop()
            self._running = None

    def _write(self, updates: int) -> str:
        traced, self._running = self._running, None
        assert traced is not None
        traced.stop()
        trace, page = (self._folder / f"rank-{self._rank}.{kind}" for kind in ("json.gz", "txt"))
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            traced.export_chrome_trace(str(trace))
            events = traced.events()
            text = "".join(f"{line}\n" for line in summary(list(events or []), updates=updates, waited=self._waited))
            write_whole(page, text.encode())
        except OSError as fault:
            return f"The profile could not be written ({fault.strerror}). Training goes on."
        return f"Updates {self._first} to {self._first + updates - 1} are traced: {page}"


def summary(events: list[FunctionEvent], *, updates: int, waited: float) -> Iterator[str]:
    """The page, line by line: time, data wait, what ranks sent and how much of it was hidden, the top operators."""
    own = [event for event in events if event.time_range.elapsed_us() >= 0]
    whole = span([_times(event) for event in own])
    seconds = (whole[1] - whole[0]) / 1e6
    yield f"{updates} updates in {seconds:.3f} s"
    yield f"waiting for data: {waited:.3f} s, {waited / seconds if seconds else 0:.1%}"
    sent, hidden = overlap(own)
    if sent:
        yield f"sent between ranks: {sent / 1e6:.3f} s, of which {hidden / sent:.1%} while this rank computed"
    else:
        yield "sent between ranks: nothing"
    busy = total(union([_times(event) for event in own if event.device_type == DeviceType.CUDA]))
    if busy:
        yield f"device busy: {busy / 1e6:.3f} s, {busy / 1e6 / seconds:.1%}"
    yield ""
    yield f"{'operator':<58}{'calls':>8}{'self ms':>12}{'share':>8}"
    times: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for event in own:
        device = event.device_type == DeviceType.CUDA
        name = f"{event.name} [device]" if device else event.name
        if not event.name.startswith(("ProfilerStep", "autograd::engine")):
            times[name] += event.time_range.elapsed_us() if device else event.self_cpu_time_total
            calls[name] += 1
    every = sum(times.values()) or 1.0
    for name in sorted(times, key=lambda each: -times[each])[:TOP]:
        yield f"{name[:57]:<58}{calls[name]:>8}{times[name] / 1e3:>12.2f}{times[name] / every:>8.1%}"
    yield f"all {sum(calls.values()):,} calls of {len(calls)} operators, {every / 1e3:.1f} ms"


def overlap(events: Iterable[FunctionEvent]) -> tuple[float, float]:
    """Microseconds in which something was being sent, and how much of that this rank spent computing, too.

    On a GPU both are kernels; on a CPU gloo's threads send while operators run in others.
    """
    events = list(events)
    device = any(event.device_type == DeviceType.CUDA for event in events)
    here = [event for event in events if not device or event.device_type == DeviceType.CUDA]
    sent = union([_times(event) for event in here if event.name.startswith(SENT)])
    work = union([_times(event) for event in here if device or event.name.startswith("aten::")] if sent else [])
    if device:
        work = union([_times(event) for event in here if not event.name.startswith(SENT)])
    return total(sent), total(sent) + total(work) - total(union([*sent, *work]))


def union(spans: Iterable[Span]) -> list[Span]:
    """The same times without overlaps, in order."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def total(spans: Iterable[Span]) -> float:
    """How long they are together."""
    return sum(end - begin for begin, end in spans)


def span(spans: Iterable[Span]) -> Span:
    """From the first beginning to the last end."""
    spans = list(spans)
    return (min(b for b, _ in spans), max(e for _, e in spans)) if spans else (0.0, 0.0)


def _times(event: FunctionEvent) -> Span:
    return event.time_range.start, event.time_range.end
