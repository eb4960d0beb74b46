"""Saving a run: in the background, one save in flight, failures told at the next call."""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from danlu.checkpoint.commit import STREAM, Job, NotSaved, Saved, carry_out
from danlu.checkpoint.disk import Disk, write_file
from danlu.checkpoint.folder import remove_checkpoint, tidy, whole
from danlu.checkpoint.host import Copies
from danlu.checkpoint.keep import Checkpoint, room_needed
from danlu.checkpoint.manifest import step_name, step_of
from danlu.checkpoint.pieces import Piece
from danlu.core.errors import Bereft, InputError

__all__ = ["NotSaved", "Piece", "Saved", "Saver", "Snapshot"]

Outcome = Saved | NotSaved
UNITS = ((1e9, "GB", 2), (1e6, "MB", 1), (1e3, "kB", 0), (1, "bytes", 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that a run needs to go on from a step.

    step     updates done
    pieces   this rank's slices of weights and optimiser state, by whole tensor's name; each element on one rank only
    facts    what is the same on all ranks, as JSON: recipe, data position, schedule, tokens, layout; floats come back
             exactly as they were
    streams  this rank's random states; given back only to the same rank of as many
    metric   the evaluation loss at this step, if it was measured: the lowest are kept
    due      it is time for it; else it is saved only because the run leaves, and goes once a newer one stands
    """

    step: int
    pieces: Mapping[str, Piece]
    facts: Mapping[str, Any]
    streams: Mapping[str, Tensor] = field(default_factory=dict)
    metric: float | None = None
    due: bool = True

    @property
    def size(self) -> int:
        """Bytes of this rank's tensors."""
        tensors = [*(p.tensor for p in self.pieces.values()), *self.streams.values()]
        return sum(t.numel() * t.element_size() for t in tensors)


class Saver:
    """Writes a run's checkpoints, from every rank alike: each rank has one, and calls it at the same steps.

    ``attempt`` names this start of the run, the same on all ranks (rank 0 draws it and tells the others); one process
    may leave it out. ``wait_seconds`` is how long ranks wait for each other's files before the save is a failure;
    ``gone`` says at once that another rank will never come.
    """

    def __init__(
        self,
        folder: Path,
        settings: Checkpoint,
        *,
        rank: int = 0,
        world: int = 1,
        attempt: str = "",
        wait_seconds: float = 1800,
        gone: Callable[[], bool] = lambda: False,
        disk: Disk | None = None,
    ):
        if world > 1 and not re.fullmatch(r"\w+", attempt):
            raise ValueError("savers of more than one rank need an attempt that all ranks share: letters and digits")
        self.folder, self.settings = folder, settings
        self.rank, self.world = rank, world
        self._attempt = attempt or str(os.getpid())
        self._wait_seconds = wait_seconds
        self._disk = disk or Disk()
        self._count = 0
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._gone = gone
        self._result: Outcome | BaseException | None = None
        self._last: int | None = None
        self._copies = Copies()
        if rank == 0:
            self._prepare()

    def save(self, snapshot: Snapshot) -> list[Outcome]:
        """The snapshot is saved, or will be: gives what came of the save before it, and of itself if that is known.

        In the background, training stands still only until the tensors are copied to the host's memory (which is kept
        for the next save: as much again as the tensors), but for those that are still. Raises what went wrong since
        the last call, if it is not a matter of the disk.
        """
        begun = time.monotonic()
        done = self.finish()
        job = self._job(snapshot)
        if not self.settings.asynchronous:
            outcome = carry_out(job)
            stall = time.monotonic() - begun
            return [*done, replace(outcome, stall_seconds=stall) if isinstance(outcome, Saved) else outcome]
        job = self._on_host(job)
        stall = time.monotonic() - begun
        self._thread = threading.Thread(target=self._run, args=(job, stall), name="danlu save", daemon=True)
        self._thread.start()
        return done

    @property
    def unprepared(self) -> bool:
        """Whether ``reserve`` would be of use: this saver copies, and has no room for it yet."""
        return self.settings.asynchronous and not self._copies.reserved

    def reserve(self, snapshot: Snapshot) -> None:
        """Room for copies of such tensors is made beside training: the first save will stall no longer than others."""
        if self._thread is None:
            self._copies.reserve(_moving(snapshot))

    def finish(self) -> list[Outcome]:
        """No save is in flight; gives what came of the last one, once. Raises what went wrong, as ``save`` does."""
        if self._thread is not None:
            while self._thread.is_alive():
                self._thread.join(0.2)
                if self._thread.is_alive() and self._gone():
                    self.abandon()
                    raise Bereft(f"a save in {self.folder} waits for another rank, which is gone")
            self._thread = None
        result, self._result = self._result, None
        if isinstance(result, BaseException):
            raise result
        return [] if result is None else [result]

    def ready(self) -> list[Outcome]:
        """What came of the last save, once, if it is over; nothing is waited for."""
        return [] if self._thread is None or self._thread.is_alive() else self.finish()

    def abandon(self) -> None:
        """This rank waits for no other any more: for leaving after a failure. What is not committed never will be."""
        self._stop.set()

    def drop_after(self, step: int) -> list[str]:
        """No checkpoint of a later step is left, so that a run gone back to this one is not resumed from those.

        Acts on rank 0 only; call it when no save is in flight.
        """
        self.finish()
        if self.rank != 0:
            return []
        later = sorted(s for p in self.folder.iterdir() if (s := step_of(p.name)) is not None and s > step)
        for each in reversed(later):
            remove_checkpoint(self._disk, self.folder, each)
        self._disk.sync_folder(self.folder)
        return [step_name(s) for s in later]

    def room(self, size: int) -> str:
        """One line for the start of a run: what checkpoints of so many bytes (all ranks) will take, and what is free.

        Raises InputError where not even one fits.
        """
        free, at_most = self._disk.free(self.folder), room_needed(size, self.settings)
        if free < size:
            raise InputError(
                f"{self.folder}: a checkpoint takes {_in_words(size)} and only {_in_words(free)} are free; "
                "free some room or give the run another folder"
            )
        held = sum(f.lstat().st_size for step in whole(self.folder) for f in (self.folder / step_name(step)).iterdir())
        line = f"checkpoints: {_in_words(size)} each"
        if at_most is None:
            return f"{line}, all kept; {_in_words(free)} free in {self.folder}: room for {free // max(size, 1)}"
        line = f"{line}, at most {_in_words(at_most)} at once; {_in_words(free)} free in {self.folder}"
        return line if free + held >= at_most else f"{line}: NOT ENOUGH, keep fewer (checkpoint.keep_last)"

    def _prepare(self) -> None:
        """The folder can be written, and nothing that an earlier run left half-done is in it."""
        try:
            self._disk.make_folder(self.folder)
            self._disk.sync_folder(self.folder.parent)
            probe = self.folder / f".write-{os.getpid()}"
            write_file(self._disk, probe, [b"?"])
            self._disk.remove(probe)
            tidy(self._disk, self.folder, self._attempt)
        except OSError as error:
            raise InputError(f"{self.folder}: checkpoints cannot be written there ({error.strerror})") from None

    def _job(self, snapshot: Snapshot) -> Job:
        if snapshot.metric is not None and not math.isfinite(snapshot.metric):
            raise ValueError(f"step {snapshot.step}: a metric of {snapshot.metric} cannot be compared; give None")
        facts = json.loads(json.dumps(snapshot.facts, allow_nan=False))  # a copy: training changes what it lent
        self._count += 1
        return Job(
            disk=self._disk,
            root=self.folder,
            rank=self.rank,
            world=self.world,
            attempt=f"{snapshot.step:06d}-{self._attempt}-{self._count}",
            step=snapshot.step,
            pieces=snapshot.pieces,
            streams=snapshot.streams,
            facts=facts,
            metric=snapshot.metric,
            settings=self.settings,
            due=snapshot.due,
            wait_seconds=self._wait_seconds,
            stop=self._stop,
        )

    def _on_host(self, job: Job) -> Job:
        """The same job with all tensors copied that are not still: training may go on changing its own."""
        copies = self._copies.of(_moving(job))
        pieces = {name: replace(piece, tensor=copies.get(name, piece.tensor)) for name, piece in job.pieces.items()}
        streams = {name: copies[STREAM + name] for name in job.streams}
        return replace(job, pieces=pieces, streams=streams)

    def _run(self, job: Job, stall: float) -> None:
        try:
            outcome = carry_out(job)
            self._result = replace(outcome, stall_seconds=stall) if isinstance(outcome, Saved) else outcome
        except BaseException as error:
            self._result = error


def _moving(held: Snapshot | Job) -> dict[str, Tensor]:
    """All tensors of it that training will change, by names that do not meet."""
    pieces = {name: piece.tensor for name, piece in held.pieces.items() if not piece.still}
    return pieces | {STREAM + name: tensor for name, tensor in held.streams.items()}


def _in_words(size: int) -> str:
    unit, name, digits = next((u for u in UNITS if size >= u[0]), UNITS[-1])
    return f"{size / unit:.{digits}f} {name}"
