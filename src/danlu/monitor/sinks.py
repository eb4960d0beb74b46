"""What is told to the outside, and the queue that keeps a slow or broken outside away from the step."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

QUEUE = 1024  # messages that may wait for one sink


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Where the run stands. Shares are 0 to 1, memory is bytes; None where nothing is known.

    loss, learning_rate, norm   of the last logging interval: the loss and norm are means over its ``averaged`` sound
                                steps, and ``unsound`` of its steps are not in them; None where none was sound
    logged                      whether this step ends a logging interval
    """

    step: int
    total_steps: int
    logged: bool
    loss: float | None
    losses: dict[str, float]
    averaged: int
    unsound: int
    learning_rate: float
    norm: float | None
    tokens: int
    tokens_per_second: float | None = None
    mfu: float | None = None
    seconds_left: float | None = None
    memory: int | None = None
    resident: int | None = None
    use: float | None = None
    watts: float | None = None
    data_wait: float | None = None


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The loss over the validation set at a step, and whether none before was lower."""

    step: int
    total_steps: int
    loss: float
    best: bool


@dataclass(frozen=True, slots=True)
class Curve:
    """The whole curve so far: (step, value) of the training loss, the evaluation loss and the learning rate."""

    train: tuple[tuple[int, float], ...]
    evaluation: tuple[tuple[int, float], ...]
    learning_rate: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Norms:
    """Norms layer by layer at a step: grad_norm/LAYER and weight_norm/LAYER."""

    step: int
    norms: dict[str, float]


@dataclass(frozen=True, slots=True)
class Back:
    """The run went back to this step: what was told of later ones is no more."""

    step: int


Message = Point | Evaluated | Curve | Norms | Back


class Sink(Protocol):
    """Somewhere outside. It may raise and it may block: it stands behind a ``Queue``."""

    def take(self, message: Message) -> None:
        """The message is shown or stored, or is of no interest here."""
        ...

    def close(self) -> None:
        """Everything taken is stored."""
        ...


class Queue:
    """A sink in a thread of its own. ``put`` never waits and never raises.

    A sink that raises is dropped, with one warning. While one blocks, messages wait up to a bound; those beyond it are
    lost, with one warning. ``build`` makes the sink in the thread, so that its imports cost the run nothing.
    """

    def __init__(self, name: str, build: Callable[[], Sink], *, warn: Callable[[str], None], bound: int = QUEUE):
        self.name = name
        self.lost = 0
        self._build, self._warn = build, warn
        self._queue: queue.Queue[Message | None] = queue.Queue(bound)
        self._dropped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"danlu-{name}", daemon=True)
        self._thread.start()

    def put(self, message: Message) -> None:
        """The message waits for the sink, or is lost and counted."""
        if self._dropped.is_set():
            return
        try:
            self._queue.put_nowait(message)
        except queue.Full:
            self.lost += 1
            if self.lost == 1:
                self._warn(
                    f"{self.name} does not keep up: what it should show is left out from here. Training goes on."
                )

    def close(self, *, timeout: float = 5.0) -> None:
        """The sink has stored all and ended; one that takes longer (seconds) is left behind, with a warning."""
        try:
            self._queue.put(None, timeout=0.1)
        except queue.Full:
            self._dropped.set()
        self._thread.join(timeout=0.2 if self._dropped.is_set() else timeout)
        if self._thread.is_alive() and not self.lost:
            self._warn(
                f"{self.name} did not finish within {timeout:g} s and was left behind; metrics.jsonl is complete."
            )

    def _run(self) -> None:
        try:
            sink = self._build()
            while (message := self._queue.get()) is not None and not self._dropped.is_set():
                sink.take(message)
            sink.close()
        except Exception as fault:
            self._dropped.set()
            self._warn(_left_out(self.name, fault))


class Latest:
    """Like ``Queue``, but only the newest message waits: for a picture, an older one is worth nothing.

    ``share`` bounds the part of the time that the sink may use; the last message is always taken.
    """

    def __init__(
        self,
        name: str,
        build: Callable[[], Sink],
        *,
        warn: Callable[[str], None],
        clock: Callable[[], float],
        share: float = 0.05,
    ):
        self.name = name
        self._build, self._warn, self._clock, self._share = build, warn, clock, share
        self._message: Message | None = None
        self._ready = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"danlu-{name}", daemon=True)
        self._thread.start()

    def put(self, message: Message) -> None:
        """The message takes the place of the one that waits."""
        with self._ready:
            self._message = message
            self._ready.notify()

    def close(self, *, timeout: float = 20.0) -> None:
        """The last message is stored; or the sink does not finish within this time (seconds) and is left behind."""
        with self._ready:
            self._closed = True
            self._ready.notify()
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._warn(
                f"{self.name} did not finish within {timeout:g} s and was left behind; metrics.jsonl is complete."
            )

    def _run(self) -> None:
        rest = 0.0
        try:
            sink = self._build()
            while True:
                with self._ready:
                    self._ready.wait_for(lambda: self._message is not None or self._closed)
                    self._ready.wait_for(lambda: self._closed, timeout=rest)
                    message, self._message, closed = self._message, None, self._closed
                if message is not None:
                    start = self._clock()
                    sink.take(message)
                    rest = (self._clock() - start) / self._share
                if closed:
                    sink.close()
                    return
        except Exception as fault:
            self._warn(_left_out(self.name, fault))


def _left_out(name: str, fault: Exception) -> str:
    text = str(fault).strip().splitlines()
    why = f"{type(fault).__name__}: {text[0]}" if text else type(fault).__name__
    return f"{name} failed and is left out from here ({why}). Training goes on; metrics.jsonl is complete."
