"""The run in a terminal: a live display, or a few plain lines where there is none."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import IO

from rich.console import Console as Screen
from rich.console import RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from danlu.core import log
from danlu.monitor.sinks import Evaluated, Message, Point

FIRST, LAST = 3.0, 60.0  # seconds between plain lines: at the start, and after some ten minutes
REFRESH = 4  # times a second that a terminal is drawn


def open_console(stream: IO[str] | None = None, *, clock: Callable[[], float] = time.monotonic) -> Terminal | Plain:
    """A live display where the stream is a terminal that can move its cursor; plain lines elsewhere."""
    stream = stream or sys.stderr
    screen = Screen(file=stream)
    if screen.is_terminal and not screen.is_dumb_terminal and stream.isatty():
        return Terminal(screen, clock=clock)
    return Plain(stream, clock=clock)


class Plain:
    """Lines without any control code. Seldom enough to be read: the first, the last, evaluations, and some between."""

    def __init__(self, stream: IO[str], *, clock: Callable[[], float] = time.monotonic):
        self._stream, self._clock = stream, clock
        self._start = self._last = clock()
        self._first = True
        self._unsaid: Point | None = None

    def take(self, message: Message) -> None:
        now = self._clock()
        if isinstance(message, Evaluated):
            self._write(evaluation_words(message))
        if not isinstance(message, Point):
            return
        gap = min(LAST, max(FIRST, (now - self._start) / 10))
        if self._first or now - self._last >= gap or message.step >= message.total_steps:
            self._first, self._last, self._unsaid = False, now, None
            self._write("  ".join([f"step {message.step}/{message.total_steps}", *facts(message)]))
        else:
            self._unsaid = message

    def close(self) -> None:
        if self._unsaid is not None:
            message, self._unsaid = self._unsaid, None
            self._write("  ".join([f"step {message.step}/{message.total_steps}", *facts(message)]))

    def _write(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


class Terminal:
    """Two lines that stay at the bottom of the terminal: the progress, and the facts that its width has room for."""

    def __init__(self, screen: Screen, *, clock: Callable[[], float] = time.monotonic):
        self._screen, self._clock = screen, clock
        self._point: Point | None = None
        self._live: Live | None = None
        self._streams: list[tuple[logging.StreamHandler[IO[str]], IO[str]]] = []
        self._start = clock()
        self._drawn = -1.0

    def take(self, message: Message) -> None:
        if isinstance(message, Evaluated):
            self._screen.print(evaluation_words(message), highlight=False, markup=False)
        if not isinstance(message, Point):
            return
        self._point = message
        if self._live is None:
            self._open()
        now = self._clock()
        if self._live and (now - self._drawn >= 1 / REFRESH or message.step >= message.total_steps):
            self._drawn = now
            self._live.update(self.render(), refresh=True)

    def render(self) -> RenderableType:
        """The two lines, for the width that the terminal has now."""
        point, width = self._point, self._screen.width
        if point is None:
            return Text("")
        left = f"step {point.step}/{point.total_steps}"
        right = " ".join(
            [f"{point.step / max(point.total_steps, 1):4.0%}", span(self._clock() - self._start)]
            + ([f"left {span(point.seconds_left)}"] if point.seconds_left is not None else [])
        )
        table = Table.grid(padding=(0, 1))
        room = width - len(left) - len(right) - 4
        if room >= 10:
            bar = ProgressBar(total=max(point.total_steps, 1), completed=point.step, width=min(room, 40))
            table.add_row(Text(left), bar, Text(right))
        else:
            table.add_row(Text(f"{left} {right}"[: width - 1]))
        lines = Table.grid()
        lines.add_row(table)
        lines.add_row(Text(fit(facts(point, eta=False), width - 1), style="dim" if point.loss is None else ""))
        return lines

    def close(self) -> None:
        if self._live is not None:
            self._live.update(self.render(), refresh=True)
            for handler, stream in self._streams:
                handler.setStream(stream)
            self._live.stop()
            self._live = None

    def _open(self) -> None:
        self._live = Live(
            self.render(), console=self._screen, auto_refresh=False, redirect_stdout=True, redirect_stderr=True
        )
        self._live.start()
        # Messages of the log go above the two lines instead of through them.
        for handler in log.logger.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is self._screen.file:
                old = handler.setStream(sys.stderr)
                if old is not None:
                    self._streams.append((handler, old))


def facts(point: Point, *, eta: bool = True) -> list[str]:
    """What there is to say of a step, the most wanted first."""
    said = []
    if point.loss is not None:
        mean = point.averaged + point.unsound > 1
        said.append(f"loss {point.loss:.4f}" + (f" (mean of {point.averaged} steps)" if mean else ""))
    if point.unsound:
        said.append(f"{point.unsound} not finite, skipped")
    if point.tokens_per_second is not None:
        said.append(f"{point.tokens_per_second:,.0f} tokens/s")
    if eta and point.seconds_left is not None:
        said.append(f"left {span(point.seconds_left)}")
    said.append(f"rate {point.learning_rate:.3g}")
    if point.norm is not None:
        said.append(f"norm {point.norm:.3g}")
    if point.mfu is not None:
        said.append(f"MFU {point.mfu:.0%}" if point.mfu >= 0.1 else f"MFU {point.mfu:.1%}")
    if point.memory is not None:
        said.append(f"memory {size(point.memory)}")
    elif point.resident is not None:
        said.append(f"memory {size(point.resident)}")
    if point.data_wait is not None:
        said.append(f"data wait {point.data_wait:.0%}")
    if point.use is not None:
        said.append(f"busy {point.use:.0%}")
    if point.watts is not None:
        said.append(f"{point.watts:.0f} W")
    return said


def evaluation_words(message: Evaluated) -> str:
    """One line for an evaluation."""
    return f"step {message.step}/{message.total_steps}  evaluation loss {message.loss:.4f}" + (
        "  (the best so far)" if message.best else ""
    )


def fit(words: list[str], width: int) -> str:
    """As many of them, in order, as fit in the width."""
    text = ""
    for word in words:
        longer = f"{text}  {word}" if text else word
        if len(longer) > width:
            break
        text = longer
    return text


def span(seconds: float) -> str:
    """A time: 0:42, 12:07, 3:05:00, or 2 d 4 h."""
    whole = round(seconds)
    if whole >= 2 * 86400:
        return f"{whole // 86400} d {whole % 86400 // 3600} h"
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def size(number: int) -> str:
    """Bytes in words: 812 MB, 1.24 GB."""
    return f"{number / 1e9:.2f} GB" if number >= 1e9 else f"{number / 1e6:.0f} MB"
