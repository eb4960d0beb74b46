"""Told to stop from outside: the step is finished first."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Told:
    """Whether this process was told to stop; the handler only remembers it, so that it is safe at any moment."""

    def __init__(self) -> None:
        self.by: str | None = None

    def __bool__(self) -> bool:
        return self.by is not None

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Remember the signal; the same one again ends the process at once, by the system's own rule."""
        self.by = signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def listening() -> Iterator[Told]:
    """SIGTERM, SIGINT and SIGUSR1 (what batch systems send before the end) are heard; afterwards all is as before."""
    told = Told()
    before = {number: signal.signal(number, told.hear) for number in STOPS}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
