"""The newest whole checkpoint, and any slice of any tensor out of it, whatever the number of ranks that wrote it."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
import xxhash
from torch import Tensor

from danlu.checkpoint.manifest import (
    Damaged,
    Manifest,
    Part,
    Table,
    aside_name,
    read_manifest,
    read_tables,
    shard_name,
    step_of,
    verify,
)
from danlu.checkpoint.shard import DTYPES, read_span, view_bytes
from danlu.checkpoint.threads import in_shares
from danlu.core.errors import InputError
from danlu.core.log import logger

AT_ONCE = 256 << 20  # bytes that are read before what wants them is served
ROWS = 8 << 20  # bytes read at once where only a part of a slice is wanted

Fetch = tuple[Part, Tensor, tuple[slice, ...], tuple[slice, ...]]  # a stored slice, where to, places in both


class Want(NamedTuple):
    """A slice that a rank wants of a named whole tensor: ``local`` elements from ``offset`` on, of one of ``shape``."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def whole(tensor: Tensor) -> Want:
        """All of a tensor like this one."""
        return Want(tuple(tensor.shape), (0,) * tensor.dim(), tuple(tensor.shape), tensor.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A checkpoint that was looked at: where it is, what its manifest and its ranks' tables say."""

    path: Path
    manifest: Manifest
    tables: tuple[Table, ...]
    skipped: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        return self.manifest.step


def open_checkpoint(path: Path) -> Found:
    """The checkpoint in this folder, its manifest and tables checked; raises Damaged."""
    try:
        manifest = read_manifest(path)
        return Found(path=path, manifest=manifest, tables=tuple(read_tables(path, manifest)))
    except OSError as error:
        raise Damaged(f"{error.filename or path}: {error.strerror}") from None


def newest(folder: Path, *, deep: bool = True) -> Found | None:
    """The newest checkpoint that is whole; None where there is none.

    Newest by the number in its name; other names are not looked at. Those that are newer and damaged are told of in
    the log and in ``skipped``, each with the reason. Deep: every byte is compared with its hash (``read`` does that
    too, for what it reads).
    """
    skipped: list[str] = []
    for path in candidates(folder):
        try:
            found = open_checkpoint(path)
            problems = verify(path) if deep else []
            if (step_of(path.name) or found.step) != found.step:
                problems = [f"its manifest is of step {found.step}"]
            if not problems:
                return Found(path=path, manifest=found.manifest, tables=found.tables, skipped=tuple(skipped))
        except Damaged as damage:
            problems = [str(damage)]
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        skipped.append(f"{path.name} was skipped: {problems[0]}{more}")
        logger.warning("%s", skipped[-1])
    if skipped:
        raise InputError(
            f"{folder}: no checkpoint is whole ({'; '.join(skipped)}); "
            "start anew with --restart, or put back a copy of a checkpoint"
        )
    return None


def candidates(folder: Path) -> list[Path]:
    """Folders that may be checkpoints, the latest step first; one moved aside comes after the one in its place."""
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        step = step_of(path.name)
        aside = re.fullmatch(r"old-(\d{6,18})", path.name)
        if step is not None and path.is_dir():
            found.append((step, 1, path))
        elif aside and path.name == aside_name(int(aside[1])) and path.is_dir():
            found.append((int(aside[1]), 0, path))
    return [path for _, _, path in sorted(found, reverse=True)]


def read(
    found: Found,
    wanted: Mapping[str, Want],
    *,
    elsewhere: Collection[str] = (),
    check: bool = True,
) -> dict[str, Tensor]:
    """The wanted slices, as new tensors on the CPU.

    Strict: every name that the checkpoint lacks, that it has and nobody wants (``elsewhere``: those that other ranks
    want), or whose shape or type differs, stands in one InputError. Reads what is needed and compares every tensor it
    reads with its hash (raises Damaged); with ``check`` off, only the rows that are needed are read.
    """
    parts = _parts(found)
    _refuse_strangers(found, wanted, parts, elsewhere)
    tensors = {name: torch.empty(want.local, dtype=want.dtype) for name, want in wanted.items()}
    todo: dict[int, list[Fetch]] = {}
    for name, want in wanted.items():
        for rank, part in parts[name]:
            if both := _meet(want, part):
                todo.setdefault(rank, []).append((part, tensors[name], *both))
    for rank, jobs in sorted(todo.items()):
        jobs.sort(key=lambda job: job[0].span.start)
        work = partial(_fetch_all, found.path / shard_name(rank), check=check)
        for _ in in_shares(work, jobs, size=lambda job: job[0].span.size):
            pass
    return tensors


def portions(found: Found, wanted: Mapping[str, Want], *, at_once: int = AT_ONCE) -> Iterator[dict[str, Tensor]]:
    """The wanted slices as ``read`` gives them, together all that the checkpoint holds: so many bytes at a time, so
    that no more need memory beside what they are copied to.
    """
    _refuse_strangers(found, wanted, _parts(found), ())
    some: dict[str, Want] = {}
    size = 0
    for name, want in wanted.items():
        some[name] = want
        size += math.prod(want.local) * want.dtype.itemsize
        if size >= at_once:
            yield read(found, some, elsewhere=wanted.keys() - some.keys())
            some, size = {}, 0
    if some:
        yield read(found, some, elsewhere=wanted.keys() - some.keys())


def streams(found: Found, rank: int, world: int) -> dict[str, Tensor] | None:
    """The random states of this rank, if as many ranks wrote the checkpoint as read it; else None."""
    if found.manifest.world != world:
        return None
    states = {}
    with open(found.path / shard_name(rank), "rb", buffering=0) as file:
        for part in found.tables[rank].streams:
            states[part.name] = torch.empty(part.local, dtype=DTYPES[part.dtype])
            if not read_span(file, part.span, view_bytes(states[part.name])):
                raise Damaged(f"{found.path}/{shard_name(rank)}: {part.name} does not match its hash")
    return states


def _parts(found: Found) -> dict[str, list[tuple[int, Part]]]:
    """Every stored slice by its whole tensor's name, with the rank that wrote it."""
    parts: dict[str, list[tuple[int, Part]]] = {}
    for table in found.tables:
        for part in table.pieces:
            parts.setdefault(part.name, []).append((table.rank, part))
    return parts


def _refuse_strangers(
    found: Found,
    wanted: Mapping[str, Want],
    parts: Mapping[str, list[tuple[int, Part]]],
    elsewhere: Collection[str],
) -> None:
    """Raises InputError unless the checkpoint holds exactly what is wanted, here or elsewhere."""
    problems = [f"missing {name}" for name in sorted((wanted.keys() | set(elsewhere)) - parts.keys())]
    problems += [f"unknown {name}" for name in sorted(parts.keys() - wanted.keys() - set(elsewhere))]
    for name, want in wanted.items():
        if name in parts:
            part = parts[name][0][1]
            if part.shape != tuple(want.shape) or DTYPES[part.dtype] != want.dtype:
                there, here = f"{part.dtype} {list(part.shape)}", f"{want.dtype} {list(want.shape)}"
                problems.append(f"{name} is {there}, not {here}")
    if problems:
        raise InputError(
            f"{found.path}: does not fit this run ({len(parts.keys() & wanted.keys())} of {len(wanted)} names found): "
            + "; ".join(problems)
        )


def _meet(want: Want, part: Part) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Where the wanted slice and a stored one share elements: within the wanted one, and within the stored one."""
    here, there = [], []
    for w_at, w_size, p_at, p_size in zip(want.offset, want.local, part.offset, part.local):
        start, stop = max(w_at, p_at), min(w_at + w_size, p_at + p_size)
        if start >= stop:
            return None
        here.append(slice(start - w_at, stop - w_at))
        there.append(slice(start - p_at, stop - p_at))
    return tuple(here), tuple(there)


def _fetch_all(path: Path, jobs: list[Fetch], *, check: bool) -> None:
    """Each slice is where it belongs; raises Damaged, naming the first that is not what was written."""
    with open(path, "rb", buffering=0) as file:
        for part, into, here, there in jobs:
            if not _fetch(file, part, into, here, there, check):
                raise Damaged(f"{path}: {part.name} does not match its hash")


def _fetch(
    file: BinaryIO,
    part: Part,
    into: Tensor,
    here: tuple[slice, ...],
    there: tuple[slice, ...],
    check: bool,
) -> bool:
    """``into[here]`` holds the stored ``[there]``; whether what was read is what was written."""
    whole = all(s.start == 0 and s.stop == n for s, n in zip(there, part.local))
    target = into[here]
    if whole and target.is_contiguous():
        return read_span(file, part.span, view_bytes(target)) or not check
    return _fetch_rows(file, part, target, there, check)


def _fetch_rows(file: BinaryIO, part: Part, target: Tensor, there: tuple[slice, ...], check: bool) -> bool:
    """The same through a buffer of a few megabytes, however large the stored slice is.

    Only the whole of it has a hash, so all of it is read where it is checked, else only the rows that are needed.
    """
    row = part.span.size // part.local[0]
    first, last = (0, part.local[0]) if check else (there[0].start, there[0].stop)
    step = min(max(1, ROWS // row), last - first)
    buffer = torch.empty((step, *part.local[1:]), dtype=target.dtype)
    state, start = xxhash.xxh3_128(), there[0].start
    file.seek(part.span.start + first * row)
    for at in range(first, last, step):
        rows = buffer[: min(step, last - at)]
        view, filled = view_bytes(rows), 0
        while filled < len(view):
            got = file.readinto(view[filled:])  # type: ignore[attr-defined]
            if not got:
                return False
            filled += got
        state.update(view)
        low, high = max(at, start), min(at + len(rows), there[0].stop)
        if low < high:
            target[low - start : high - start].copy_(rows[(slice(low - at, high - at), *there[1:])])
    return not check or state.hexdigest() == part.span.hash
