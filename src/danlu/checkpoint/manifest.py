"""What makes a folder a checkpoint: its parts, their sizes and hashes; reading and checking it.

The chain of hashes: ``manifest.json`` carries its own, and that of each ``rank-000.json``; each of those carries that
of its shard's header and of every tensor in it. No byte of a checkpoint is outside of it.
"""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from danlu.checkpoint.shard import DTYPES, Span, check_span, digest
from danlu.checkpoint.threads import in_shares

FORMAT = "danlu checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
MAX_MANIFEST = 64 << 20
MAX_TABLE = 256 << 20
_TAIL = b',\n"hash": "%s"\n}\n'
_TAIL_SIZE = len(_TAIL % (b"0" * 32))


class Damaged(Exception):
    """A checkpoint that may not be used, with the file and what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A contiguous slice of a named whole tensor (or, of no name that is shared, a rank's stream) in a shard."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local: tuple[int, ...]
    dtype: str
    span: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """What one rank wrote: its shard's size and header, which slice lies where, and its random streams."""

    rank: int
    step: int
    size: int
    facts: str
    header: Span
    pieces: tuple[Part, ...]
    streams: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What the whole checkpoint is: its step, the facts that ranks share, and each rank's table by size and hash.

    due: it was time for it; else it was saved only because the run left there.
    """

    step: int
    world: int
    attempt: str
    metric: float | None
    facts: Mapping[str, Any]
    tables: tuple[tuple[int, str], ...]
    due: bool = True


def shard_name(rank: int) -> str:
    """rank-000.safetensors"""
    return f"rank-{rank:03d}.safetensors"


def table_name(rank: int) -> str:
    """rank-000.json"""
    return f"rank-{rank:03d}.json"


def step_name(step: int) -> str:
    """step-000100; more digits where they are needed, so that names are read as numbers, never sorted as text."""
    return f"step-{step:06d}"


def step_of(name: str) -> int | None:
    """The step of a folder's name; None for any other name."""
    found = re.fullmatch(r"step-(\d{6,18})", name)
    return int(found[1]) if found and name == step_name(int(found[1])) else None


def aside_name(step: int) -> str:
    """old-000100: a checkpoint of a step that is being saved anew, until the new one stands in its place."""
    return f"old-{step:06d}"


def seal(body: Mapping[str, Any], indent: int | None = None) -> bytes:
    """The JSON of it, whose last line is the hash of all bytes before: a change of any bit shows."""
    text = json.dumps(body, indent=indent, allow_nan=False, ensure_ascii=False).encode()[:-1].rstrip()
    return text + _TAIL % digest(text).encode()


def unseal(content: bytes, what: str) -> dict[str, Any]:
    """The JSON object that was sealed; Damaged where any bit of it has changed."""
    text, tail = content[:-_TAIL_SIZE], content[-_TAIL_SIZE:]
    if tail != _TAIL % digest(text).encode():
        raise Damaged(f"{what}: its content does not match its hash")
    try:
        value = json.loads(content, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{what}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise Damaged(f"{what}: not a JSON object")
    return value


def write_table(table: Table) -> bytes:
    """The content of a rank's table."""
    parts = [[_part(p) for p in group] for group in (table.pieces, table.streams)]
    return seal(
        {
            "format": FORMAT,
            "version": VERSION,
            "rank": table.rank,
            "step": table.step,
            "shard": shard_name(table.rank),
            "size": table.size,
            "header": [table.header.size, table.header.hash],
            "facts": table.facts,
            "pieces": parts[0],
            "streams": parts[1],
        }
    )


def read_table(content: bytes, what: str) -> Table:
    """The table in it; Damaged, naming what, where it is not one."""
    body = unseal(content, what)
    with _Reading(what):
        _check_version(body, what)
        header_size, header_hash = body["header"]
        table = Table(
            rank=_count(body["rank"]),
            step=_count(body["step"]),
            size=_count(body["size"]),
            facts=str(body["facts"]),
            header=Span(start=0, size=_count(header_size), hash=str(header_hash)),
            pieces=tuple(_read_part(p) for p in body["pieces"]),
            streams=tuple(_read_part(p) for p in body["streams"]),
        )
    edge = table.header.size
    for part in sorted((*table.pieces, *table.streams), key=lambda p: p.span.start):
        if part.span.size and part.span.start != edge:
            raise Damaged(f"{what}: {part.name} does not begin where the tensor before it ends")
        edge += part.span.size
    if edge != table.size:
        raise Damaged(f"{what}: its tensors end at byte {edge}, its shard at {table.size}")
    return table


def write_manifest(manifest: Manifest) -> bytes:
    """The content of manifest.json."""
    ranks = [
        {"shard": shard_name(rank), "table": table_name(rank), "size": size, "hash": hashed}
        for rank, (size, hashed) in enumerate(manifest.tables)
    ]
    return seal(
        {
            "format": FORMAT,
            "version": VERSION,
            "step": manifest.step,
            "world": manifest.world,
            "attempt": manifest.attempt,
            "metric": manifest.metric,
            "due": manifest.due,
            "facts": manifest.facts,
            "ranks": ranks,
        },
        indent=1,
    )


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint; Damaged where there is none, or not one that can be trusted."""
    body = unseal(read_small(folder / MANIFEST, MAX_MANIFEST), MANIFEST)
    with _Reading(MANIFEST):
        _check_version(body, MANIFEST)
        metric = body["metric"]
        manifest = Manifest(
            step=_count(body["step"]),
            world=_count(body["world"]),
            attempt=str(body["attempt"]),
            metric=None if metric is None else float(metric),
            facts=dict(body["facts"]),
            tables=tuple((_count(entry["size"]), str(entry["hash"])) for entry in body["ranks"]),
            due=bool(body.get("due", True)),
        )
        if len(manifest.tables) != manifest.world:
            raise ValueError(f"{len(manifest.tables)} ranks of {manifest.world}")
    return manifest


def read_tables(folder: Path, manifest: Manifest) -> list[Table]:
    """Every rank's table, each with the hash that the manifest holds, each shard of the size that its table holds."""
    tables = []
    for rank, (size, hashed) in enumerate(manifest.tables):
        name = table_name(rank)
        content = read_small(folder / name, MAX_TABLE)
        if len(content) != size or digest(content) != hashed:
            raise Damaged(f"{name}: its content does not match its hash in {MANIFEST}")
        table = read_table(content, name)
        if (table.rank, table.step) != (rank, manifest.step):
            raise Damaged(f"{name}: is of rank {table.rank} at step {table.step}")
        actual = _size(folder / shard_name(rank))
        if actual != table.size:
            raise Damaged(f"{shard_name(rank)}: {actual} bytes, written were {table.size}")
        tables.append(table)
    return tables


def verify(folder: Path, *, deep: bool = True) -> list[str]:
    """What is wrong with a checkpoint, a line each with the file's name; empty where it is whole.

    Deep: every byte is read and compared with its hash; else the manifest and the tables only, and the shards' sizes.
    """
    try:
        manifest = read_manifest(folder)
        tables = read_tables(folder, manifest)
    except (Damaged, OSError) as problem:
        return [str(problem)]
    problems: list[tuple[str, int, str]] = []
    for table in tables if deep else ():
        path = folder / shard_name(table.rank)
        spans = [(table.header, "its header")]
        spans += [
            (part.span, f"{part.name} (bytes {part.span.start} to {part.span.start + part.span.size})")
            for part in (*table.pieces, *table.streams)
        ]
        for found in in_shares(partial(_compare, path), spans, size=lambda span: span[0].size):
            problems += found
    return [f"{name}: {problem}" for name, _, problem in sorted(problems)]


def _compare(path: Path, spans: list[tuple[Span, str]]) -> list[tuple[str, int, str]]:
    """What does not match its hash: the file's name, the place in it, a sentence."""
    buffer = bytearray(4 << 20)
    try:
        with open(path, "rb", buffering=0) as file:
            wrong = [(span, what) for span, what in spans if not check_span(file, span, buffer)]
    except OSError as problem:
        return [(path.name, 0, problem.strerror or repr(problem))]
    return [(path.name, span.start, f"{what} does not match its hash") for span, what in wrong]


def read_small(path: Path, limit: int) -> bytes:
    """All of a plain file that may be at most so large; links are not followed, so nothing outside is read."""
    if _size(path) > limit:
        raise Damaged(f"{path.name}: larger than {limit} bytes")
    return path.read_bytes()


def _size(path: Path) -> int:
    try:
        facts = path.lstat()
    except FileNotFoundError:
        raise Damaged(f"{path.name}: missing") from None
    if not stat.S_ISREG(facts.st_mode):
        raise Damaged(f"{path.name}: not a plain file")
    return facts.st_size


def _part(part: Part) -> list[Any]:
    return [part.name, part.dtype, part.shape, part.offset, part.local, part.span.start, part.span.size, part.span.hash]


def _read_part(value: Sequence[Any]) -> Part:
    name, dtype, shape, offset, local, start, size, hashed = value
    part = Part(
        name=str(name),
        dtype=str(dtype),
        shape=tuple(_count(n) for n in shape),
        offset=tuple(_count(n) for n in offset),
        local=tuple(_count(n) for n in local),
        span=Span(start=_count(start), size=_count(size), hash=str(hashed)),
    )
    if problem := misplaced(part.shape, part.offset, part.local):
        raise ValueError(f"{part.name}: {problem}")
    if part.span.size != math.prod(part.local) * DTYPES[part.dtype].itemsize:
        raise ValueError(f"{part.name}: {part.span.size} bytes do not make {part.dtype} of {list(part.local)}")
    return part


def misplaced(shape: Sequence[int], offset: Sequence[int], local: Sequence[int]) -> str | None:
    """Why a slice does not lie within the whole; None where it does."""
    if not len(shape) == len(offset) == len(local):
        return f"a slice of {list(local)} at {list(offset)} has not as many dimensions as the whole {list(shape)}"
    if any(o < 0 or o + n > whole for whole, o, n in zip(shape, offset, local)):
        return f"a slice of {list(local)} at {list(offset)} does not fit into {list(shape)}"
    return None


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} is no count")
    return value


def _check_version(body: Mapping[str, Any], what: str) -> None:
    if body["format"] != FORMAT:
        raise Damaged(f"{what}: not of a danlu checkpoint")
    if body["version"] != VERSION:
        raise Damaged(f"{what}: has format version {body['version']}; this danlu reads version {VERSION}")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")


class _Reading:
    """Turns a value of the wrong kind into Damaged with the file's name."""

    def __init__(self, what: str):
        self.what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (KeyError, TypeError, ValueError, AttributeError)):
            raise Damaged(f"{self.what}: {type(error).__name__} {error}") from None
