"""Files of one JSON object a line: written as they come, whole again after a crash, cut at resume."""

from __future__ import annotations

import errno
import json
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from danlu.core.paths import write_whole


class Lines:
    """Adds lines to a file. Each is in the system at once: a killed process loses none. ``sync`` makes them durable."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        mend(path)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  (closed by close)
        self._lock = threading.Lock()

    def add(self, facts: Mapping[str, object]) -> None:
        """The line is in the file; a number that is not finite is refused, since JSON has none."""
        content = json.dumps(facts, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        with self._lock:
            if self._file.closed:
                return
            before = os.fstat(self._file.fileno()).st_size
            try:
                if self._file.write(content) != len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)
            except OSError:
                self._file.truncate(before)  # no half line, or the next would be lost with it
                raise

    def amend(self, facts: Mapping[str, object], *, step: int) -> None:
        """The last line, if it is of this step, has these facts, too; a crash leaves the old or the new."""
        with self._lock:
            if self._file.closed:
                return
            path = Path(self._file.name)
            before, _, last = path.read_bytes().removesuffix(b"\n").rpartition(b"\n")
            there = _parse(last + b"\n")
            if there is None or there.get("step") != step:
                return  # it was lost, which the reader of this file was told
            line = json.dumps(there | dict(facts), ensure_ascii=False, allow_nan=False).encode() + b"\n"
            write_whole(path, (before + b"\n" if before else b"") + line)
            self._file.close()
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115  (closed by close)

    def sync(self) -> None:
        """What was added outlives a loss of power."""
        with self._lock:
            if not self._file.closed:
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Nothing more is added."""
        with self._lock:
            self._file.close()


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole line of the file; a torn last one is left out."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        for content in file:
            facts = _parse(content)
            if facts is not None:
                yield facts


def mend(path: Path) -> None:
    """The file ends with a whole line: what a crash left of another is gone."""
    _truncate(path, keep=lambda facts: True)


def cut(path: Path, step: int) -> None:
    """The file holds no line beyond this step, and no torn one; lines must be in the order of their steps.

    Read from the end, so that it takes as long as what is cut, not as long as the file.
    """
    _truncate(path, keep=lambda facts: isinstance(facts.get("step"), int) and facts["step"] <= step)


def after(path: Path, step: int) -> bytes:
    """The lines of later steps, as they stand; lines must be in the order of their steps."""
    if not path.exists():
        return b""
    content = path.read_bytes()
    end = start = len(content)
    while start > 0:
        begin = content.rfind(b"\n", 0, start - 1) + 1
        facts = _parse(content[begin:start])
        if facts is not None and isinstance(facts.get("step"), int) and facts["step"] <= step:
            break
        start = begin
    return content[start:end]


def _truncate(path: Path, *, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Drop lines from the end until one is whole and to be kept."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with open(path, "r+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end = len(content)
            while end > 0:
                start = content.rfind(b"\n", 0, end - 1) + 1
                facts = _parse(content[start:end])
                if facts is not None and keep(facts):
                    break
                end = start
            size = len(content)
        if end < size:
            file.truncate(end)
            os.fsync(file.fileno())


def _parse(content: bytes) -> dict[str, Any] | None:
    """The line's object, or None if it is torn."""
    if not content.endswith(b"\n"):
        return None
    try:
        facts = json.loads(content)
    except ValueError:
        return None
    return facts if isinstance(facts, dict) else None
