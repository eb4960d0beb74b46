"""One run per folder."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import weakref
from pathlib import Path
from types import TracebackType

from danlu.core.errors import InputError


class Lock:
    """Held as long as this process lives, or until it is released: a second run in the folder is refused.

    The system frees it when the process ends, however it ends, so there is no stale lock to remove. The file's content
    only says who holds it. Children that are forked give it up at once, so a worker that outlives a killed run does not
    keep its folder closed. Folders that were made for it and hold nothing else when it is released are gone with it.
    """

    def __init__(self, path: Path):
        self._path = path
        self._made = [folder for folder in path.parents if not folder.exists()]  # the innermost first
        self._handle = _take(path)
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        mine = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _close_in_child(mine()))

    def release(self) -> None:
        """Another run may have the folder."""
        if self._handle < 0:
            return
        with contextlib.suppress(OSError):  # not empty: something else has come into it
            if self._made and os.listdir(self._path.parent) == [self._path.name]:  # noqa: PTH208
                self._path.unlink()
                for folder in self._made:
                    folder.rmdir()
        self.give_up()

    def give_up(self) -> None:
        """This process holds it no longer, and touches nothing."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


def _take(path: Path) -> int:
    """The file that stands there, open and locked; InputError where another process holds it."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(handle)
            os.close(handle)
            raise InputError(
                f"{path.parent}: another run is at work there ({holder}); wait for it, stop it, "
                "or give this run a folder of its own"
            ) from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), path.stat()):
                return handle
        os.close(handle)  # whoever held it has just taken it away: what is locked now is no file of this folder


def _close_in_child(lock: Lock | None) -> None:
    if lock is not None:
        lock.give_up()


def _holder(handle: int) -> str:
    try:
        facts = json.loads(os.pread(handle, 4096, 0))
        return f"process {int(facts['pid'])} on {str(facts['host'])[:200]}"
    except (OSError, ValueError, TypeError, KeyError):
        return "it has not yet said which process it is"
