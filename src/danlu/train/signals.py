"""Told to stop from outside: the step is finished and saved first."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from danlu.core.errors import Interrupted

# What batch systems, containers, keyboards and closed terminals send before the end.
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
ECHO = 0.1  # seconds; `timeout` and others send one signal twice: to the process, and to its group
TOGETHER = 1.0  # seconds; systems that signal a whole job reach a rank twice: directly, and through its launcher


class Told:
    """Whether this process was told to stop.

    Before the first update there is nothing to save: a signal ends the start-up at once. ``owner``: the process is
    ours alone, and ends with it; what an exception would do depends on what is being imported just then, for libraries
    swallow some and go on half-made. (A run may be killed at any moment without loss.) From ``wait_for_step`` on it
    is only remembered, and the loop looks at it after each step. A second one ends the process at once, by the system's
    own rule; of a rank that our launcher started, the launcher decides that, for it hears what the user sends. From
    ``stop_listening`` on all is saved, and nothing more is heard.
    """

    def __init__(self, *, owner: bool = False) -> None:
        self.by: str | None = None
        self.owner = owner
        self.ranks = False  # one of several: they are told twice, and their launcher can go without them
        self.launched = False  # by our own launcher
        self.name = ""  # before what it says
        self._waits = self._deaf = False
        self._when = 0.0
        self._parent = os.getppid()

    def __bool__(self) -> bool:
        if self.by is None and self.ranks and os.getppid() != self._parent:
            self.by = "the end of its launcher"
        return self.by is not None

    def wait_for_step(self) -> None:
        """From here on a signal waits until the step is finished and saved."""
        self._waits = True

    def stop_listening(self) -> None:
        """From here on signals change nothing any more."""
        self._deaf = True

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Remember the signal, or act on it."""
        if self._deaf:
            return
        now = time.monotonic()
        if self.by is not None:
            if now - self._when < self._same():
                return
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.by, self._when = signal.Signals(number).name, now
        if not self._waits:
            end = Interrupted(f"stopped by {self.by} while starting, before any update; the same command begins again")
            if not self.owner:
                raise end
            os.write(2, f"{self.name}{end}\n".encode())
            os._exit(Interrupted.code)

    def _same(self) -> float:
        """Seconds in which another signal is taken for the same one."""
        if self.launched and os.getppid() == self._parent:
            return math.inf
        return TOGETHER if self.ranks else ECHO


@contextmanager
def listening(*, owner: bool = False) -> Iterator[Told]:
    """Signals that ask for an end are heard; afterwards all is as before. ``owner``: see ``Told``.

    Outside the main thread, where Python lets none be heard, nothing changes.
    """
    told = Told(owner=owner)
    if threading.current_thread() is not threading.main_thread():
        yield told
        return
    with handled(told.hear):
        yield told


@contextmanager
def handled(hear: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Signals that ask for an end come to ``hear``; afterwards all is as before. An ignored hang-up stays ignored."""
    heard = [n for n in STOPS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, hear) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
