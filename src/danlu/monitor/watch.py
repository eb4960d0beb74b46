"""The hook that a run calls after each step: it keeps the books, shows where the run stands, looks after its health."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

import psutil
import torch

from danlu.core import device as devices
from danlu.core import log
from danlu.core.contracts import Signal
from danlu.core.paths import RunFolder
from danlu.core.report import Report
from danlu.core.world import World
from danlu.monitor import plot
from danlu.monitor.books import Books, Plan
from danlu.monitor.causes import Finding, Likely, remedy
from danlu.monitor.console import open_console
from danlu.monitor.health import Health
from danlu.monitor.layers import GRADIENT, WEIGHT, Strata
from danlu.monitor.meters import DataWait, Sampler, Speed, mfu
from danlu.monitor.noise import BatchAdvice
from danlu.monitor.order import Order
from danlu.monitor.reading import Reading, finite, line, read
from danlu.monitor.settings import Monitor
from danlu.monitor.sinks import Back, Evaluated, Latest, Message, Norms, Point, Queue
from danlu.monitor.spikes import Spotter, Trouble
from danlu.monitor.tensorboard import TensorBoard
from danlu.monitor.trend import Trend

SHOW = 0.1  # seconds between two points for the console; nobody reads faster
OF_SAMPLES = ("skipped", "unlabelled", "unshuffled", "repeated")  # what is told together with the samples' ids
OFTEN = 5  # of a warning that every step may bring, this many are said; all stand in events.jsonl


def watch(
    settings: Monitor,
    folder: RunFolder,
    plan: Plan,
    *,
    world: World,
    device: torch.device,
    stream: IO[str] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Watch | Guard:
    """The hook of this rank: the first writes and shows; the others only look after health.

    ``metrics.jsonl`` is cut to ``plan.start_step``, so that each step stands once. ``stream`` is standard error unless
    given.
    """
    spikes, layers = settings.spikes, settings.layers
    health = Health(
        max_unsound=settings.max_unsound_steps,
        max_unlabelled=settings.max_unlabelled_steps,
        total_steps=plan.total_steps - plan.start_step,
        spotter=None if spikes is None else Spotter(spikes),
        trend=Trend(
            rise=2.0 if spikes is None else spikes.rise,
            plateau=settings.plateau_steps,
            trained=plan.trained,
            peak=plan.peak_rate,
        ),
        strata=None if layers is None else Strata(layers),
    )
    if not world.first:
        return Guard(health)
    return Watch(settings, folder, plan, health, world=world, device=device, stream=stream or sys.stderr, clock=clock)


class Guard:
    """The hook of every rank but the first: it answers as the first one does, and writes nothing."""

    def __init__(self, health: Health):
        self.health = health

    def __call__(self, report: Report) -> Signal:
        return self.health.look(read(report))[0]

    @property
    def cause(self) -> str | None:
        """Why it answered STOP."""
        return self.health.cause

    @contextmanager
    def pause(self, kind: str) -> Iterator[None]:
        """Nothing is measured here."""
        yield

    def event(self, name: str, **facts: object) -> None:
        """The first rank writes it."""

    def evaluated(self, step: int, loss: float, **facts: object) -> None:
        """The first rank writes it."""

    @property
    def unshuffled(self) -> bool:
        """The first rank looks after it."""
        return False

    def bear(self, trouble: Trouble, likely: Likely | None) -> None:
        """As the first rank does."""
        self.health.bear(new=likely is not None)

    def remember(self, record: Mapping[str, object]) -> None:
        """The first rank writes it."""

    def set_aside(self, name: str, *, after: int) -> None:
        """The first rank writes it."""

    def went_back(self, step: int, facts: Mapping[str, object]) -> None:
        """The first rank writes it."""

    def flush(self) -> None:
        """Nothing is held here."""

    def curve(self, *, width: int = 72) -> str:
        """The first rank draws it."""
        return ""

    def close(self) -> dict[str, Any]:
        """Nothing is open here."""
        return {}


class Watch:
    """The hook of the first rank. Between steps it is told of pauses, evaluations and events; ``close`` ends it."""

    def __init__(
        self,
        settings: Monitor,
        folder: RunFolder,
        plan: Plan,
        health: Health,
        *,
        world: World,
        device: torch.device,
        stream: IO[str],
        clock: Callable[[], float],
    ):
        self._settings, self._folder, self._plan, self.health, self._device = settings, folder, plan, health, device
        self._order = Order()
        self._stream, self._clock, self._begun = stream, clock, clock()
        self._counts: dict[str, int] = {}
        self._point: Point | None = None  # the last, while the console has not been given it
        self._shown = -1e9
        self._closed: dict[str, Any] | None = None
        self.books = Books(folder, plan, logging_steps=settings.logging_steps)
        every = {"evaluate": plan.eval_steps or 0, "save": plan.save_steps or 0}
        self.speed = Speed(total_steps=plan.total_steps, start_step=plan.start_step, every=every, clock=clock)
        self._wait = DataWait(
            bound=settings.max_data_wait, workers=plan.workers, prefetch=plan.prefetch, cores=psutil.cpu_count() or 1
        )
        self._batch = BatchAdvice()
        one = devices.peak_flops(device, plan.dtype) if plan.flops_per_token else None
        self.peak_flops = None if one is None else one * world.size
        self._sampler = Sampler(devices.Gauges(device))
        self._sampler.start()
        self._sinks, self._picture = self._open_sinks()

    def __call__(self, report: Report) -> Signal:
        """The step stands in metrics.jsonl and is shown; STOP, with ``cause``, if the run is not well."""
        reading = read(report)
        lap = self.speed.lap(report)
        books = self.books
        books.tokens += lap.tokens
        rate, used = self._rates()
        books.add(
            line(
                reading,
                tokens=books.tokens,
                tokens_per_second=rate,
                mfu=used,
                memory=devices.memory_peak(self._device),
            )
        )
        self._tell(reading)
        signal, findings = self.health.look(reading, last_checkpoint=books.last_checkpoint)
        for finding in [*findings, *self._order.see(reading)]:
            samples = {"samples": list(report.samples)} if finding.kind in OF_SAMPLES else {}
            books.event(finding.kind, {**finding.facts(), **samples})
            self._say(finding.sentence, kind=finding.kind)
        if advice := self._wait.advice(self.speed):
            books.event("data_wait", {"cause": advice})
            log.logger.warning(advice)
        if advice := self._batch.advice(report):
            books.event("noise", {"cause": advice})
            log.logger.info(advice)
        return signal if books.full is None else Signal.STOP

    @property
    def cause(self) -> str | None:
        """Why it answered STOP."""
        return self.health.cause or self.books.full

    @contextmanager
    def pause(self, kind: str) -> Iterator[None]:
        """What is done inside ("evaluate", "save" or another word) is no training: speed and time left leave it out.

        Before a save, what belongs to the steps so far is made durable: a checkpoint never has more steps than
        metrics.jsonl.
        """
        with self.speed.pause(kind):
            if kind == "save":
                self.flush()
            yield

    def event(self, name: str, **facts: object) -> None:
        """The event stands in events.jsonl, with its step and time. "saved" with a ``path`` is remembered."""
        self.books.event(name, facts)

    def evaluated(self, step: int, loss: float, **facts: object) -> None:
        """The evaluation stands in the line of its step (the last reported), in the curve, in trainer_state.json."""
        best = self.books.evaluated(step, loss, facts)
        if finite({"loss": loss}):
            self._send(Evaluated(step, self._plan.total_steps, loss, best))
        else:
            log.logger.warning(f"The evaluation loss at step {step} is not finite.")
        self.flush()
        if self._picture:
            self._picture.put(self.books.history.curve())

    @property
    def unshuffled(self) -> bool:
        """Whether samples were seen to come one after the other, or again and again."""
        return self._order.found

    def bear(self, trouble: Trouble, likely: Likely | None) -> None:
        """The run goes on in its trouble, and what comes from here on is its new usual. ``likely``: what is behind it,
        where that is known."""
        self.health.bear(new=likely is not None)
        found = Finding("borne", f"{trouble.cause} The run goes on, and takes what comes as usual.", likely)
        self.books.event(found.kind, found.facts())
        self._say(found.sentence, kind=found.kind)

    def remember(self, record: Mapping[str, object]) -> None:
        """That the run went back stands in events.jsonl, once."""
        self.books.event_once("rolled_back", dict(record), of="number")

    def set_aside(self, name: str, *, after: int) -> None:
        """The lines of metrics.jsonl after a step stand, too, in a file of this name among those set aside."""
        self.books.set_aside(name, after=after)

    def went_back(self, step: int, facts: Mapping[str, object]) -> None:
        """The run goes on from an earlier step: later lines are gone from metrics.jsonl, curves and trainer_state.json,
        and events.jsonl says so, once."""
        self._point = None
        self.books.go_back(step)
        self.remember(facts)
        likely = Likely(str(facts["likely"]))
        log.logger.warning(
            f"Went back from step {facts['from']} to step {step} (its checkpoint is {facts['checkpoint']}), "
            f"and on with other data: {facts['cause']} {remedy(likely)}"
        )
        self.speed.step = step
        self._send(Back(step))

    def flush(self) -> None:
        """metrics.jsonl and events.jsonl hold everything so far, durably; trainer_state.json is up to date."""
        self.books.flush()

    def curve(self, *, width: int = 72) -> str:
        """The loss curve so far, as text for the terminal."""
        encoding = (getattr(self._stream, "encoding", None) or "ascii").lower().replace("-", "")
        return plot.text(self.books.history.curve(), width=width, unicode=encoding.startswith("utf"))

    def close(self) -> dict[str, Any]:
        """Everything is written, drawn and ended; a summary of this process's part. A second call changes nothing."""
        if self._closed is None:
            if self._point is not None:
                self._send(self._point)
            if self._picture:
                self._picture.put(self.books.history.curve())
                self._picture.close()
            for sink in self._sinks:
                sink.close()
            self._sampler.stop()
            self.books.close()
            self._closed = self._summary()
        return self._closed

    def _open_sinks(self) -> tuple[list[Queue], Latest | None]:
        settings, plan, books, sinks = self._settings, self._plan, self.books, []
        if settings.console:
            # Its failure is not said on the stream that failed.
            quiet = lambda text: books.event("warning", {"cause": text})  # noqa: E731
            sinks.append(Queue("console", lambda: open_console(self._stream, clock=self._clock), warn=quiet))
        if settings.tensorboard:
            board = lambda: TensorBoard(self._folder.tensorboard, start_step=plan.start_step)  # noqa: E731
            sinks.append(Queue("TensorBoard", board, warn=books.warn))
        if not settings.curve:
            return sinks, None
        picture = lambda: plot.Picture(self._folder.curve, title=plan.title)  # noqa: E731
        return sinks, Latest("loss.png", picture, warn=books.warn, clock=self._clock)

    def _rates(self) -> tuple[float | None, float | None]:
        """Tokens a second, and MFU."""
        rate = self.speed.tokens_per_second
        return rate, mfu(rate, flops_per_token=self._plan.flops_per_token, peak_flops=self.peak_flops)

    def _tell(self, reading: Reading) -> None:
        """The sinks have what they should of this step."""
        report, sample, history = reading.report, self._sampler.last, self.books.history
        logged = history.seen(
            step=report.step,
            loss=reading.loss if report.sound else None,
            losses=reading.losses,
            norm=reading.norm,
            learning_rate=report.learning_rate,
        )
        now = self._clock()
        show = now - self._shown >= SHOW or report.step >= self._plan.total_steps
        interval = history.interval
        if logged or self._shown < 0:
            self._means = (interval.loss, interval.losses, interval.averaged, interval.unsound, interval.norm)
        loss, losses, averaged, unsound, norm = self._means
        rate, used = self._rates()
        point = Point(
            step=report.step,
            total_steps=self._plan.total_steps,
            logged=logged,
            loss=loss,
            losses=losses,
            averaged=averaged,
            unsound=unsound,
            learning_rate=report.learning_rate,
            norm=norm,
            tokens=self.books.tokens,
            tokens_per_second=rate,
            mfu=used,
            seconds_left=self.speed.seconds_left,
            memory=devices.memory_peak(self._device),
            resident=sample.resident,
            use=sample.use,
            watts=sample.watts,
            data_wait=self.speed.data_wait,
        )
        if norms := {n: v for n, v in report.extra.items() if n.startswith((GRADIENT, WEIGHT))}:
            self._send(Norms(report.step, norms))
        for sink in self._sinks:
            if show if sink.name == "console" else logged:
                sink.put(point)
        self._shown = now if show else self._shown
        self._point = None if show else point

    def _send(self, message: Message) -> None:
        for sink in self._sinks:
            sink.put(message)

    def _say(self, text: str, *, kind: str) -> None:
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if count <= OFTEN:
            log.logger.warning(text + (" Further ones stand only in events.jsonl." if count == OFTEN else ""))

    def _summary(self) -> dict[str, Any]:
        speed, history = self.speed, self.books.history
        train = [point["loss"] for point in history.train if "loss" in point]
        mean = speed.tokens / speed.seconds if speed.seconds else None
        return finite(
            {
                "steps": speed.laps,
                "tokens": speed.tokens,
                "loss": train[-1] if train else None,
                "best_eval_loss": history.best,
                "best_step": history.best_step,
                "tokens_per_second": mean,
                "mfu": mfu(mean, flops_per_token=self._plan.flops_per_token, peak_flops=self.peak_flops),
                "train_seconds": speed.seconds,
                "pause_seconds": sum(seconds for _, seconds in speed.paused.values()),
                "wall_seconds": self._clock() - self._begun,
                "data_wait": speed.data_wait,
                "loop_overhead": speed.overhead,
                "peak_resident_bytes": self._sampler.peak_resident,
                "peak_memory_bytes": devices.memory_peak(self._device),
                "joules": self._sampler.joules,
                "unsound_steps": self.health.unsound_in_all,
            }
        )
