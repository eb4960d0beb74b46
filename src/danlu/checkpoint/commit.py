"""How many ranks write one checkpoint that appears at once, or not at all.

Ranks meet through files alone, never through collectives, so all of it can run in a thread beside training:

1. every rank writes its shard, then its table, into a folder ``tmp-…`` of this attempt; or, if it cannot, a note why;
2. rank 0 waits for all of them, checks that the slices make whole tensors, writes the manifest, syncs the folder,
   renames it to ``step-…`` and syncs the folder above; only then are older checkpoints removed;
3. the others wait until they see the manifest of this attempt in place, or rank 0's word that the save came to nothing.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

from torch import Tensor

from danlu.checkpoint.disk import FULL, Disk, write_file
from danlu.checkpoint.folder import prune
from danlu.checkpoint.keep import Checkpoint
from danlu.checkpoint.manifest import (
    MANIFEST,
    Damaged,
    Manifest,
    Part,
    Table,
    aside_name,
    read_manifest,
    read_small,
    read_table,
    seal,
    shard_name,
    step_name,
    table_name,
    unseal,
    write_manifest,
    write_table,
)
from danlu.checkpoint.pieces import Piece, uncovered
from danlu.checkpoint.shard import CODES, Span, digest, write_shard
from danlu.core.errors import Failure

VERDICT = "failed.json"
STREAM = "stream/"  # before the names of random streams in a shard, so that they never meet a tensor's
MAX_NOTE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class NotSaved:
    """A save that came to nothing because of the disk. Training goes on; the next save tries again."""

    step: int
    message: str
    needed: int
    free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint that is whole and durable; what was removed after it; how long training stood still for it."""

    step: int
    path: Path
    size: int
    seconds: float
    stall_seconds: float = 0.0
    removed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One rank's share of one save."""

    disk: Disk
    root: Path
    rank: int
    world: int
    attempt: str
    step: int
    pieces: Mapping[str, Piece]
    streams: Mapping[str, Tensor]
    facts: Mapping[str, Any]
    metric: float | None
    settings: Checkpoint
    due: bool
    wait_seconds: float
    stop: Event = field(default_factory=Event)

    @property
    def folder(self) -> Path:
        """Where this attempt writes."""
        return self.root / f"tmp-{self.attempt}"

    @property
    def size(self) -> int:
        """Bytes of this rank's tensors."""
        tensors = [*(p.tensor for p in self.pieces.values()), *self.streams.values()]
        return sum(t.numel() * t.element_size() for t in tensors)

    @property
    def facts_hash(self) -> str:
        """What every rank must agree on."""
        return digest(json.dumps([self.step, self.metric, self.due, self.facts], sort_keys=True).encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Note:
    """Why a rank could not write: a disk's fault (training goes on) or a fault that ends the run."""

    message: str
    of_disk: bool
    needed: int = 0
    free: int = 0


def carry_out(job: Job) -> Saved | NotSaved:
    """This rank's share is written and the checkpoint stands, or nothing of it is left.

    Failures of the disk are given back, all others raised. Of several ranks' words rank 0's counts: only it knows
    whether the very last step, making the new name durable, went well.
    """
    begun = time.monotonic()
    note = _write(job)
    outcome = _lead(job, note) if job.rank == 0 else _follow(job, note)
    if isinstance(outcome, _Note):
        if not outcome.of_disk:
            raise Failure(outcome.message)
        return NotSaved(step=job.step, message=outcome.message, needed=outcome.needed, free=outcome.free)
    removed = prune(job.disk, job.root, job.step, job.settings) if job.rank == 0 else ()
    seconds = time.monotonic() - begun
    return Saved(step=job.step, path=job.root / step_name(job.step), size=outcome, seconds=seconds, removed=removed)


def _write(job: Job) -> _Note | None:
    """Shard and table of this rank are durable, or neither is there and the reason is given."""
    try:
        job.disk.make_folder(job.folder)
        if job.rank == 0:
            _clear_earlier(job)
        write_part(job)
    except OSError as error:
        note = disk_note(job, error)
    except Exception as error:
        note = _Note(message=f"rank {job.rank} could not save step {job.step}: {error!r}", of_disk=False)
    else:
        return None
    _forget(job, [job.rank])
    if job.rank != 0:
        _persist(job, f"rank-{job.rank:03d}.failed", note)
    return note


def write_part(job: Job) -> None:
    """This rank's shard and table are durable. Rank 0 sees the table only then: it commits as soon as it sees it."""
    tensors = {name: piece.tensor for name, piece in job.pieces.items()}
    tensors |= {STREAM + name: tensor for name, tensor in job.streams.items()}
    header, spans = write_shard(job.disk, job.folder / shard_name(job.rank), tensors)
    pieces = (_record(name, piece, spans[name]) for name, piece in job.pieces.items())
    streams = (_record(name, Piece.whole(tensor), spans[STREAM + name]) for name, tensor in job.streams.items())
    table = Table(
        rank=job.rank,
        step=job.step,
        size=header.size + sum(span.size for span in spans.values()),
        facts=job.facts_hash,
        header=header,
        pieces=tuple(pieces),
        streams=tuple(streams),
    )
    part = job.folder / f"{table_name(job.rank)}.part"
    write_file(job.disk, part, [write_table(table)])
    job.disk.rename(part, job.folder / table_name(job.rank))


def _record(name: str, piece: Piece, span: Span) -> Part:
    local = tuple(piece.tensor.shape)
    dtype = CODES[piece.tensor.dtype]
    return Part(name=name, shape=tuple(piece.shape), offset=tuple(piece.offset), local=local, dtype=dtype, span=span)


def _lead(job: Job, own: _Note | None) -> int | _Note:
    """What rank 0 does after its own part: wait, check, commit; or tell all why not. Gives the bytes written."""
    try:
        tables, notes = _gather(job, own)
        note = next((n for n in notes if not n.of_disk), None) or (notes[0] if notes else None)
        if note is None and (problem := _disagreement(job, [t for t, _ in tables])):
            note = _Note(message=problem, of_disk=False)
        if note is None:
            commit(job, [(len(content), digest(content)) for _, content in tables])
            return sum(table.size + len(content) for table, content in tables)
    except OSError as error:
        note = disk_note(job, error)
    except Failure as failure:
        note = _Note(message=str(failure), of_disk=False)
    except Exception as error:  # a fault of ours: the other ranks must not wait for it
        note = _Note(message=f"rank 0 could not save step {job.step}: {error!r}", of_disk=False)
    _give_up(job, note)
    return note


def commit(job: Job, tables: list[tuple[int, str]]) -> None:
    """The folder of this attempt has become the checkpoint of its step, durably."""
    manifest = Manifest(
        step=job.step,
        world=job.world,
        attempt=job.attempt,
        metric=job.metric,
        facts=job.facts,
        tables=tuple(tables),
        due=job.due,
    )
    write_file(job.disk, job.folder / MANIFEST, [write_manifest(manifest)])
    job.disk.sync_folder(job.folder)
    final = job.root / step_name(job.step)
    if final.exists():  # saved before (and perhaps damaged since): it stays readable until the new one stands there
        job.disk.remove(job.root / aside_name(job.step))
        job.disk.rename(final, job.root / aside_name(job.step))
    job.disk.rename(job.folder, final)
    job.disk.sync_folder(job.root)


def _give_up(job: Job, note: _Note) -> None:
    """Nothing that takes room is left of this attempt; a checkpoint moved aside for it is back; others know."""
    aside, final = job.root / aside_name(job.step), job.root / step_name(job.step)
    if aside.exists() and not final.exists():
        with contextlib.suppress(OSError):
            job.disk.rename(aside, final)
    _forget(job, range(job.world))
    if job.world == 1:
        job.disk.remove(job.folder)
    else:
        _persist(job, VERDICT, note)


def _follow(job: Job, own: _Note | None) -> int | _Note:
    """What the other ranks do after their part: wait for rank 0's commit or its word that there is none."""

    def look() -> int | _Note | None:
        if (verdict := _read_note(job.folder / VERDICT)) is not None:
            return verdict
        with contextlib.suppress(Damaged, OSError):
            if read_manifest(job.root / step_name(job.step)).attempt == job.attempt:
                return 0
        return None

    found: int | _Note | None = _poll(job, look)
    if found is None:
        waited = f"rank {job.rank} waited {job.wait_seconds:.0f} s for rank 0 to finish the save of step {job.step}"
        return own or _Note(message=f"{waited} in {job.root}; is that a folder that all ranks share?", of_disk=False)
    return found


def _gather(job: Job, own: _Note | None) -> tuple[list[tuple[Table, bytes]], list[_Note]]:
    """Every rank's table, and the notes of those that have none; raises Failure that names ranks that gave neither."""
    tables: dict[int, tuple[Table, bytes]] = {}
    notes: dict[int, _Note] = {0: own} if own else {}

    def look() -> bool | None:
        for rank in range(job.world):
            if rank in tables or rank in notes:
                continue
            with contextlib.suppress(Damaged, OSError):  # not yet there, or not yet all of it
                content = read_small(job.folder / table_name(rank), 1 << 30)
                tables[rank] = (read_table(content, table_name(rank)), content)
            if rank not in tables and (note := _read_note(job.folder / f"rank-{rank:03d}.failed")):
                notes[rank] = note
        return True if len(tables) + len(notes) == job.world else None

    if not _poll(job, look):
        missing = [r for r in range(job.world) if r not in tables and r not in notes]
        names = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        raise Failure(
            f"the save of step {job.step} waited {job.wait_seconds:.0f} s for {names} in {job.root}; "
            "is that a folder that all ranks share?"
        )
    return [tables[rank] for rank in sorted(tables)], [notes[rank] for rank in sorted(notes)]


def _poll(job: Job, look: Callable[[], Any]) -> Any:
    """What look gives, as soon as it gives something; None when the time is over or the run is ending."""
    deadline, pause = time.monotonic() + job.wait_seconds, 0.001
    while (found := look()) is None:
        if time.monotonic() > deadline or job.stop.wait(pause):
            return None
        pause = min(pause * 1.5, 0.1)
    return found


def _disagreement(job: Job, tables: list[Table]) -> str | None:
    """Why these tables do not make a checkpoint; None where they do."""
    strangers = [t.rank for t in tables if t.facts != job.facts_hash]
    if strangers:
        return f"ranks {strangers} do not agree with rank 0 about step {job.step} or its facts: nothing was saved"
    problems = uncovered(part for table in tables for part in table.pieces)
    if problems:
        return f"the slices of step {job.step} do not make whole tensors: {'; '.join(problems[:20])}"
    return None


def _clear_earlier(job: Job) -> None:
    """Attempts that came before this one are gone; rank 0 alone does this, and no rank writes into them any more.

    The last one stays when there are more ranks: a slower rank may not yet have read there that it came to nothing.
    Ranks save in step, so all have read it when the save after this one begins.
    """
    start, _, count = job.attempt.rpartition("-")
    own = start.partition("-")[2]
    last = re.compile(rf"tmp-\d+-{own}-{int(count) - 1}") if job.world > 1 else None
    for path in job.root.glob("tmp-*"):
        if path != job.folder and not (last and last.fullmatch(path.name)):
            job.disk.remove(path)


def _forget(job: Job, ranks: Iterable[int]) -> None:
    """Neither shard nor table of these ranks is left in this attempt."""
    for rank in ranks:
        for name in (shard_name(rank), table_name(rank), f"{table_name(rank)}.part"):
            with contextlib.suppress(OSError):
                job.disk.remove(job.folder / name)
    with contextlib.suppress(OSError):
        job.disk.remove(job.folder / MANIFEST)


def disk_note(job: Job, error: OSError) -> _Note:
    """A plain sentence about what the disk said, with the path and the bytes needed and free."""
    try:
        free = job.disk.free(job.root)
    except OSError:
        free = 0
    full = error.errno in FULL
    reason = "the disk is full" if full else (error.strerror or repr(error))
    message = (
        f"step {job.step} was not saved to {job.root}: {reason} "
        f"({job.size:,} bytes needed by rank {job.rank}, {free:,} free); earlier checkpoints are untouched, "
        "and the next save tries again"
    )
    return _Note(message=message, of_disk=True, needed=job.size, free=free)


def _persist(job: Job, name: str, note: _Note) -> None:
    """The note is there for other ranks to read; where there is no room for it, a file of its name and without content,
    which says that; where there is none even for that, it is tried until there is or the time is over."""
    content = seal({"message": note.message, "of_disk": note.of_disk, "needed": note.needed, "free": note.free})

    def attempt() -> bool | None:
        with contextlib.suppress(OSError):
            job.disk.make_folder(job.folder)
            write_file(job.disk, job.folder / name, [content])
            return True
        with contextlib.suppress(OSError):
            job.disk.close(job.disk.create(_wordless(job.folder / name)))
            return True
        return None

    _poll(job, attempt)


def _read_note(path: Path) -> _Note | None:
    try:
        body = unseal(read_small(path, MAX_NOTE), path.name)
    except (Damaged, OSError):
        if _wordless(path).exists():
            return _Note(message=f"{path.parent}: a rank found no room on its disk, not even for a word", of_disk=True)
        return None
    return _Note(message=body["message"], of_disk=body["of_disk"], needed=body["needed"], free=body["free"])


def _wordless(note: Path) -> Path:
    """The file without content that stands for a note for which there was no room."""
    return note.with_name(f"{note.name}.full")
