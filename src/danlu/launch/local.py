"""Ranks on this machine, by torchrun's own launcher."""

from __future__ import annotations

import logging
import sys
import uuid

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from danlu.core import world
from danlu.core.errors import Failure, Interrupted
from danlu.core.log import logger

GRACE_SECONDS = 300  # what ranks are given to finish their step and save, once told to stop


def start(words: list[str], *, count: int) -> int:
    """`danlu WORDS` has run on `count` ranks; when one fails, the others are ended within seconds.

    The ranks meet on a free port of the loopback interface. Gives 0; a failure is raised with the exit code of the
    rank that failed first, whose own message has been printed by itself.
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
        monitor_interval=0.1,
        shutdown_timeout=GRACE_SECONDS,
        logs_specs=DefaultLogsSpecs(),
    )
    try:
        elastic_launch(config, sys.executable)("-m", "danlu", *words)
    except SignalException:
        raise Interrupted("stopped by a signal; the same command goes on") from None
    except ChildFailedError as error:
        rank, first = min(error.failures.items(), key=lambda item: (item[1].timestamp, item[0]))
        raise _failure(rank, first.exitcode) from None
    logger.debug("all %d ranks ended well", count)
    return 0


def _failure(rank: int, code: int) -> Failure:
    if code == Interrupted.code:
        return Interrupted("stopped by a signal; saved; the same command goes on")
    if code < 0:
        return Failure(f"rank {rank} was killed by signal {-code}; the other ranks were ended")
    failure = Failure(
        f"rank {rank} failed first, with exit code {code} (its message stands above); the others were ended"
    )
    failure.code = code
    return failure
