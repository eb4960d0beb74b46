"""A pool of gloo ranks that lives as long as the test session.

Starting a rank costs an `import torch` (about two seconds on one core), so ranks are started once, when first needed,
and each test sends them a function by reference. A rank that dies or hangs ends its test, and the pool starts anew.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 120.0


class Ranks:
    """Processes that wait for work; `run` gives the same function to as many of them as asked."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("spawn")
        self.workers: list[tuple[Any, Connection]] = []

    def run(
        self, function: Callable[..., Any], *arguments: Any, size: int = 2, limit: float = LIMIT_SECONDS
    ) -> list[Any]:
        """What `function(world, *arguments)` gave on each of `size` ranks that have met over gloo.

        The function is sent by reference, so it must stand at the top of a module. An error on any rank is raised
        here with that rank's traceback; a hang is ended after `limit` seconds.
        """
        while len(self.workers) < size:
            self._start()
        with tempfile.TemporaryDirectory() as folder:
            for rank, (_, pipe) in enumerate(self.workers[:size]):
                pipe.send((function, arguments, rank, size, str(Path(folder) / "store")))
            return self._gather(size, time.monotonic() + limit)

    def close(self) -> None:
        """No rank is left."""
        for process, _ in self.workers:
            process.kill()
            process.join()
        self.workers.clear()

    def _start(self) -> None:
        mine, theirs = self.context.Pipe()
        process = self.context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self.workers.append((process, mine))

    def _gather(self, size: int, deadline: float) -> list[Any]:
        results: dict[int, Any] = {}
        failure = None
        while len(results) < size and failure is None:
            for rank, (process, pipe) in enumerate(self.workers[:size]):
                if rank in results:
                    continue
                if pipe.poll(0.005):
                    try:
                        fine, value = pipe.recv()
                    except EOFError:
                        fine, value = False, f"the process ended with {process.exitcode}"
                    results[rank] = value
                    failure = None if fine else f"rank {rank}: {value}"
                elif time.monotonic() > deadline:
                    failure = f"rank {rank} gave no answer in time"
                if failure:
                    break
        if failure:
            self.close()
            raise RankError(failure)
        return [results[rank] for rank in range(size)]


class RankError(AssertionError):
    """A rank raised, died or hung; the message says which and why."""


def _serve(pipe: Connection) -> None:
    import torch

    from danlu.core.world import World

    torch.set_num_threads(1)
    while True:
        try:
            function, arguments, rank, size, store = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, _meet(function, arguments, World(rank=rank, size=size, local_rank=rank), store)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def _meet(function: Callable[..., Any], arguments: tuple[Any, ...], world: Any, store: str) -> Any:
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    dtype = torch.get_default_dtype()
    if world.size > 1:
        meeting = dist.FileStore(store, world.size)
        dist.init_process_group(
            "gloo", store=meeting, rank=world.rank, world_size=world.size, timeout=timedelta(seconds=60)
        )
        dist.barrier()  # a function that shares nothing could otherwise leave while the others still connect
    try:
        return function(world, *arguments)
    finally:
        torch.set_default_dtype(dtype)
        if dist.is_initialized():
            dist.destroy_process_group()
            # What torch remembers of DTensors holds meshes that equal the next ones, but of groups that are gone.
            _clear_sharding_prop_cache()
