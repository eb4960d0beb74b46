"""Ranks on this machine, by torchrun's own launcher."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from types import FrameType

import psutil
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from danlu.core import world
from danlu.core.errors import Failure, InputError, Interrupted, Unhealthy
from danlu.train.signals import ECHO, handled

GRACE_SECONDS = 300  # what ranks are given to finish their step and save, once told to stop
MOURNING_SECONDS = 8  # what ranks are given to end by themselves, once another has failed
LOOK_SECONDS = 0.1


def start(words: list[str], *, count: int) -> int:
    """`danlu WORDS` has run on `count` ranks, and no rank is left; when one fails, the others end within seconds.

    The ranks meet on a free port of the loopback interface. A signal that asks for an end is passed on to all of them;
    a second one ends them at once. Gives the exit code of the rank that failed first where that says all (2, 3, 75:
    the rank has said why); else raises a Failure that names the rank.
    """
    world.prepare_children(count)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # its tables would bury the cause
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=LOOK_SECONDS,
        logs_specs=DefaultLogsSpecs(),
    )
    outcome: Future[None] = Future()

    def launch() -> None:
        try:
            elastic_launch(config, sys.executable)("-m", "danlu", *words)
            outcome.set_result(None)
        except BaseException as error:
            outcome.set_exception(error)

    # In a thread of its own the launcher leaves signals to us: its own way would lose a second signal and the ranks'
    # exit codes.
    agent = threading.Thread(target=launch, name="danlu launch", daemon=True)
    with _listening() as told:
        agent.start()
        try:
            return _wait(outcome, told)
        finally:
            _end(_ranks())
            agent.join(10)


class _Told:
    """Signals that asked for an end."""

    def __init__(self) -> None:
        self.by: list[int] = []
        self.when = 0.0

    def hear(self, number: int, frame: FrameType | None) -> None:
        """The first is passed on to the ranks by whoever waits for them; a second one ends them here and now."""
        now = time.monotonic()
        if self.by and now - self.when < ECHO:
            return
        self.by.append(number)
        self.when = self.when or now
        if len(self.by) > 1:
            _end(_ranks())


@contextlib.contextmanager
def _listening() -> Iterator[_Told]:
    told = _Told()
    with handled(told.hear):
        yield told


def _wait(outcome: Future[None], told: _Told) -> int:
    """The exit code, once no rank runs any more."""
    passed = late = False
    while not outcome.done():
        with contextlib.suppress(TimeoutError):
            outcome.exception(LOOK_SECONDS)
        if told.by and not passed and (running := _ranks()):
            passed = True
            for rank in running:
                _send(rank, told.by[0])
        if told.by and not late and time.monotonic() - told.when > GRACE_SECONDS:
            late = True
            _end(_ranks())
    error = outcome.exception()
    if error is None:
        return 0
    if not isinstance(error, ChildFailedError):
        raise error
    if late:
        raise Failure(f"the ranks did not save within {GRACE_SECONDS} s and were ended; the same command goes on")
    first, failure = _first(error.failures)
    return _code(first, failure.exitcode, told)


def _first(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """The rank that failed first. Times are whole seconds, so the order of noticing decides; a rank that was only
    ended with the others is never the first."""
    noticed = list(failures.items())
    return next((item for item in noticed if item[1].exitcode != -signal.SIGTERM), noticed[0])


def _code(rank: int, code: int, told: _Told) -> int:
    """The exit code of the whole; raises what the rank could not say itself."""
    if code in (InputError.code, Unhealthy.code, Interrupted.code):
        return code
    if told.by:
        how = "at once, by a second signal" if len(told.by) > 1 else "before they listened"
        failure = Interrupted(f"the ranks were ended {how}; the same command goes on from the newest checkpoint")
        failure.code = 128 + told.by[-1] if len(told.by) > 1 else Interrupted.code
        raise failure
    if code < 0:
        name = signal.Signals(-code).name
        why = "; most likely memory ran out" if code == -signal.SIGKILL else ""
        raise Failure(
            f"rank {rank} was killed by signal {-code} ({name}{why}), and the other ranks were ended; "
            "the same command goes on from the newest checkpoint"
        )
    raise Failure(f"rank {rank} failed first, with exit code {code}: its message stands above; the others were ended")


def _ranks() -> list[psutil.Process]:
    """Processes that were started from here."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process().children()
    return []


def _send(rank: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.Error, OSError):
        rank.send_signal(number)


def _end(ranks: list[psutil.Process]) -> None:
    """These ranks are gone, with whatever they started: each leads a session of its own."""
    for rank in ranks:
        with contextlib.suppress(OSError):
            os.killpg(rank.pid, signal.SIGKILL)
