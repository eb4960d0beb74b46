"""The processes that encode batches, or this one.

Each is a fresh interpreter that speaks over its pipes. Nothing is forked, and the caller's main module is not imported
again, so that neither threads nor unguarded scripts are in the way.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from danlu.core.errors import Failure
from danlu.corpus.batches import Batch, Encoder, Piece, encode

Encoded = tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]


class Encoders:
    """Encodes batches in the order given, in this process or in several; the ids are the same."""

    def __init__(self, encoder: Encoder, *, workers: int) -> None:
        self._encoder = encoder
        self._count = workers if workers > 1 else 0
        self._workers: list[Worker] = []
        self._free: SimpleQueue[Worker] = SimpleQueue()

    def __enter__(self) -> Encoders:
        for number in range(1, self._count + 1):
            self._workers.append(Worker(number, self._count))
        for worker in self._workers:
            worker.send(self._encoder)
            self._free.put(worker)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.stop()

    def map(self, work: Iterator[Batch]) -> Iterator[tuple[Batch, Encoded]]:
        """Each batch with its ids, in order; no more than two batches a process are held at once."""
        if not self._workers:
            for batch in work:
                yield batch, encode(self._encoder, batch.pieces)
            return
        with ThreadPoolExecutor(len(self._workers)) as threads:  # one to wait at each process's pipe
            waiting: deque[tuple[Batch, Future[Encoded]]] = deque()
            try:
                for batch in work:
                    waiting.append((batch, threads.submit(self._ask, batch.pieces)))
                    if len(waiting) >= 2 * len(self._workers):
                        yield waiting[0][0], waiting[0][1].result()
                        waiting.popleft()
                for batch, future in waiting:
                    yield batch, future.result()
            except BaseException:
                for worker in self._workers:  # whoever waits at a pipe is set free
                    worker.stop()
                threads.shutdown(cancel_futures=True)
                raise

    def _ask(self, pieces: list[Piece]) -> Encoded:
        worker = self._free.get()
        try:
            worker.send(pieces)
            return worker.receive()
        finally:
            self._free.put(worker)


class Worker:
    """One process that encodes what is sent to it."""

    def __init__(self, number: int, of: int) -> None:
        self._name = f"tokenising process {number} of {of}"
        self._pipe, far = Pipe()
        handle = far.fileno()
        start = f"import sys; sys.path[:] = {sys.path!r}; from danlu.corpus.encoders import serve; serve({handle})"
        self._process = subprocess.Popen([sys.executable, "-c", start], stdin=subprocess.DEVNULL, pass_fds=[handle])
        far.close()  # so that the pipe ends with the process

    @property
    def id(self) -> int:
        """The process's id."""
        return self._process.pid

    def send(self, message: object) -> None:
        """The process has it; Failure if there is no process any more."""
        try:
            self._pipe.send(message)
        except OSError as error:
            raise self._death() from error

    def receive(self) -> Any:
        """What the process answers; what it raised is raised here."""
        try:
            answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._death() from error
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def stop(self) -> None:
        """The process is gone, and whoever waits for its answer is told so."""
        self._process.kill()
        self._process.wait()

    def _death(self) -> Failure:
        code = self._process.wait()
        kept = "Nothing half done is kept; the same command begins these files again."
        if code < 0:
            name = signal.Signals(-code).name
            why = " (most likely memory ran out: fewer data.workers need less)" if code == -signal.SIGKILL else ""
            return Failure(f"{self._name} (id {self.id}) was killed by signal {-code}, {name}{why}. {kept}")
        return Failure(f"{self._name} (id {self.id}) ended with exit code {code}; it says why above. {kept}")


def serve(handle: int) -> None:
    """Encode what comes through the pipe until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent, who gets it too, ends us
    os.putenv("TOKENIZERS_PARALLELISM", "false")  # the processes share the cores already
    os.putenv("RAYON_NUM_THREADS", "1")
    pipe = Connection(handle)
    try:
        encoder: Encoder = pipe.recv()
        while True:
            pieces = pipe.recv()
            try:
                pipe.send(encode(encoder, pieces))
            except (EOFError, OSError):
                return
            except Exception as error:  # told to the parent, who raises it
                pipe.send(error)
    except (EOFError, OSError):  # the parent has no more, or is gone
        return
