"""The cache of token shards: what each is kept under, whole or not at all.

An entry is a folder, named after a hash of everything that determines its ids: the file's content (never its name or
its time), the tokenizer, and how documents are taken out. It is built under another name and renamed when it is whole.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

from danlu.core.errors import InputError, Unhealthy
from danlu.files.megatron import Index, verify
from danlu.files.sidecar import part

VERSION = 1  # of the rules by which a file becomes ids; a change of them is a new version
SMALL = (
    64 << 20
)  # bytes of a shard that is checked whole each time (a few hundredths of a second), so need not be synced
REJECTS = "rejects.jsonl"
BUILDING, LOCK = ".building-", ".lock"
ABANDONED = 60  # seconds after which an unlocked half-built folder is nobody's


def key(**facts: str | int) -> str:
    """The name of an entry: 32 hexadecimal digits that depend on every fact."""
    return xxhash.xxh3_128_hexdigest(json.dumps({"version": VERSION, **facts}, sort_keys=True).encode())


def find(cache: Path, name: str, *, tokenizer: str) -> tuple[Index | None, str]:
    """The entry's shard; None where there is none, and then why, if there is a damaged one.

    Sizes, header and sidecar are looked at; of a small shard, every byte.
    """
    folder = cache / name
    if not folder.is_dir():
        return None, ""
    try:
        shard = Index(folder / "tokens")
        if shard.sidecar is None:
            return None, "its sidecar is missing"
        if shard.sidecar.tokenizer != tokenizer:
            return None, "its sidecar is of another tokenizer"
        if any(source["rejects"] for source in shard.sidecar.sources) and not (folder / REJECTS).is_file():
            return None, "its list of rejects is missing"
        if sum(part(shard.prefix, ending).stat().st_size for ending in (".bin", ".idx")) <= SMALL:
            verify(shard.prefix)
    except InputError as error:
        return None, str(error)
    return shard, ""


@contextmanager
def build(cache: Path, name: str) -> Iterator[Path]:
    """A folder to build an entry in; it becomes the entry if all goes well, and is gone if not.

    Several processes may build the same entry at once: the first to be done is kept. A killed build leaves a folder of
    another name, which ``clear`` takes away.
    """
    with told(cache):
        cache.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{BUILDING}{name}-", dir=cache))
        lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
            (folder / LOCK).unlink()
            _publish(folder, cache / name)
        finally:
            os.close(lock)
            shutil.rmtree(folder, ignore_errors=True)


def drop(cache: Path, name: str) -> None:
    """There is no such entry any more. It is renamed first, so that no one finds half of it."""
    with told(cache):
        grave = Path(tempfile.mkdtemp(prefix=BUILDING, dir=cache))
        with suppress(FileNotFoundError):  # another process may have dropped it
            (cache / name).rename(grave / name)
        shutil.rmtree(grave, ignore_errors=True)


def clear(cache: Path) -> None:
    """Half-built folders of processes that are gone are gone too."""
    for folder in cache.glob(f"{BUILDING}*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime < ABANDONED:
                continue
            if (folder / LOCK).exists():
                lock = os.open(folder / LOCK, os.O_RDWR)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                finally:
                    os.close(lock)
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def told(cache: Path) -> Iterator[None]:
    """Trouble with the cache folder is told in a sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Unhealthy(f"the disk is full: tokens are kept in {cache}. Free some and run it again.") from error
        where = f" ({error.filename})" if error.filename else ""
        raise InputError(
            f"tokens cannot be kept in {cache}: {error.strerror}{where}; choose another folder."
        ) from error


def _publish(folder: Path, entry: Path) -> None:
    folder.chmod(0o755)  # a temporary folder is its owner's alone
    try:
        folder.rename(entry)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise  # else another process was first, with the same content
