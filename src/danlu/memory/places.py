"""Where bytes are kept that the device need not hold: the host's memory, or a file on a disk."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from danlu.core import words
from danlu.core.errors import InputError, Unhealthy

PAGE = mmap.ALLOCATIONGRANULARITY
SLAB = 2**28  # pinned memory comes in powers of two, so that many small rooms share one of them
FULL = (errno.ENOSPC, errno.EDQUOT)
PATIENCE_SECONDS = 600.0


class Place(Protocol):
    """Rooms of bytes, each known by a number. Rooms are made and left by one thread; two others read and write."""

    still: bool  # whether what was lent stays as it is while somebody looks at it

    def reserve(self, sizes: Iterable[int]) -> None:
        """There will be rooms of so many bytes each."""
        ...

    def room(self, size: int) -> int:
        """A room for so many bytes."""
        ...

    def leave(self, room: int) -> None:
        """The room may be given to others, once nobody looks at it."""
        ...

    def lent(self, room: int) -> bool:
        """Whether somebody looks at it, so that nothing may be written there."""
        ...

    def another(self, room: int, size: int) -> int:
        """Where to write what replaces the content of a room that is lent: another one, or this one once it is not."""
        ...

    def read(self, room: int, start: int, into: Tensor) -> None:
        """`into`, contiguous, holds what lies there from byte `start` on."""
        ...

    def write(self, room: int, start: int, content: Tensor) -> None:
        """What is in `content`, contiguous, lies there from byte `start` on."""
        ...

    def lend(self, room: int) -> Tensor:
        """What lies there, as bytes on the host."""
        ...


class Host:
    """Memory of the host, pinned where the device is another, so that copies run beside its work."""

    still = False

    def __init__(self, *, pin: bool) -> None:
        self.pin = pin
        self._slabs: list[tuple[Tensor, int]] = []  # and how far each is used
        self._rooms: list[Tensor] = []

    def reserve(self, sizes: Iterable[int]) -> None:
        """Nothing to do: memory is taken when it is needed."""

    def room(self, size: int) -> int:
        """A room for so many bytes."""
        index = next((at for at, (slab, used) in enumerate(self._slabs) if slab.numel() - used >= size), None)
        if index is None:
            whole = max(size, SLAB if self.pin else size)
            index = len(self._slabs)
            self._slabs.append((torch.empty(whole, dtype=torch.uint8, pin_memory=self.pin), 0))
        slab, used = self._slabs[index]
        self._slabs[index] = slab, used + _pages(size)
        self._rooms.append(slab[used : used + size])
        return len(self._rooms) - 1

    def leave(self, room: int) -> None:
        """Nothing to do: what is lent is not still, so that no room is ever left for another."""

    def lent(self, room: int) -> bool:
        """Never: who wants what was lent to stay as it is, copies it."""
        return False

    def another(self, room: int, size: int) -> int:
        """The same one: nothing is ever lent."""
        return room

    def read(self, room: int, start: int, into: Tensor) -> None:
        """On the stream of the moment, which must be waited for."""
        held = self._rooms[room]
        there = flat(into)
        there.copy_(held[start : start + there.numel()], non_blocking=True)

    def write(self, room: int, start: int, content: Tensor) -> None:
        """On the stream of the moment, which must be waited for."""
        given = flat(content)
        self._rooms[room][start : start + given.numel()].copy_(given, non_blocking=True)

    def lend(self, room: int) -> Tensor:
        """The memory itself."""
        return self._rooms[room]


class File:
    """A file without a name in a folder of the user's: gone with the process, however that ends.

    Rooms are allocated when they are made, so that a full disk is met then and not in the middle of a write. What is
    lent is mapped, not copied: it takes none of our memory before it is looked at. The system's own copies of the file
    (its page cache) are not ours, and give way when memory is short.
    """

    still = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Unbuffered and nameless: nothing is left behind, even by a process that is killed.
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise InputError(
                f"memory.offload_folder: nothing can be written in {folder} ({_reason(error)}); "
                "give another folder, or null to keep optimizer states in memory"
            ) from None
        self._handle = self._file.fileno()
        self._sizes: dict[int, int] = {}
        self._end = 0
        self._free: dict[int, list[int]] = {}
        self._left: list[int] = []
        self._maps: dict[int, list[weakref.ref[mmap.mmap]]] = {}

    def reserve(self, sizes: Iterable[int]) -> None:
        """The disk has given up what rooms of so many bytes each take; InputError where it has not as much."""
        size = sum(_pages(each) for each in sizes)
        try:
            _allocate(self._handle, 0, size)
        except OSError as error:
            full = error.errno in FULL
            has = f"{words.size(shutil.disk_usage(self.folder).free)} are free" if full else _reason(error)
            raise InputError(
                f"memory.offload_folder: optimizer states take {words.size(size)} in {self.folder} ({has}); "
                "free some room, or give another folder"
            ) from None

    def room(self, size: int) -> int:
        """A room for so many bytes; Unhealthy where the disk has none, which has then changed nothing."""
        whole = _pages(size)
        self._take_back()
        if self._free.get(whole):
            at = self._free[whole].pop()
        else:
            at = self._end
            try:
                _allocate(self._handle, at, whole)
            except OSError as error:
                raise self._failure(error) from None
            self._end += whole
        self._sizes[at] = size
        return at

    def leave(self, room: int) -> None:
        """The room may be given to others, once nobody looks at it."""
        self._left.append(room)

    def lent(self, room: int) -> bool:
        """Whether something that was lent is still in use."""
        alive = [one for one in self._maps.get(room, ()) if one() is not None]
        if room in self._maps:
            self._maps[room] = alive
        return bool(alive)

    def another(self, room: int, size: int) -> int:
        """A new room; where the disk has none, the same one, as soon as nobody looks at it."""
        try:
            return self.room(size)
        except Unhealthy:
            until = time.monotonic() + PATIENCE_SECONDS
            while self.lent(room):
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)
            return room

    def read(self, room: int, start: int, into: Tensor) -> None:
        """Straight into memory of the host; elsewhere by way of it."""
        if not into.is_cpu:
            host = torch.empty(into.shape, dtype=into.dtype, pin_memory=True)
            self.read(room, start, host)
            into.copy_(host)
            return
        left, at = flat(into).numpy().data, room + start
        try:
            while len(left):
                got = os.preadv(self._handle, [left], at)
                if not got:
                    raise OSError(errno.EIO, "the file is shorter than what was written")
                left, at = left[got:], at + got
        except OSError as error:
            raise self._failure(error) from None

    def write(self, room: int, start: int, content: Tensor) -> None:
        """Into the system's hands, which brings it to the disk in its own time: nobody reads it after a crash."""
        left, at = flat(content).cpu().numpy().data, room + start
        try:
            while len(left):
                done = os.pwrite(self._handle, left, at)
                left, at = left[done:], at + done
        except OSError as error:
            raise self._failure(error) from None

    def lend(self, room: int) -> Tensor:
        """The file itself, mapped; nothing else is written there while the tensor, or a view of it, lives."""
        size = self._sizes[room]
        mapped = mmap.mmap(self._handle, max(size, 1), offset=room)
        self._maps.setdefault(room, []).append(weakref.ref(mapped))
        return torch.frombuffer(mapped, dtype=torch.uint8, count=size) if size else torch.empty(0, dtype=torch.uint8)

    def _take_back(self) -> None:
        held = [room for room in self._left if self.lent(room)]
        for room in set(self._left) - set(held):
            self._free.setdefault(_pages(self._sizes[room]), []).append(room)
        self._left = held

    def _failure(self, error: OSError) -> Unhealthy:
        full = error.errno in FULL
        failure = Unhealthy(
            f"memory.offload_folder: {self.folder} {'is full' if full else f'fails ({_reason(error)})'}, so optimizer "
            f"states cannot be kept there; {'free some room' if full else 'mend it'}, give another folder, or take "
            "optimizer out of memory.offload. Checkpoints are whole: the same command goes on from the newest"
        )
        failure.shared = False  # other ranks have folders or disks of their own
        return failure


def flat(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, without a copy."""
    return tensor.detach().view(-1).view(torch.uint8)


def _pages(size: int) -> int:
    """Bytes of the whole pages that so many take: one at least."""
    return max(1, -(-size // PAGE)) * PAGE


def _allocate(handle: int, at: int, size: int) -> None:
    """The file has these bytes, and the disk has given them up."""
    try:
        os.posix_fallocate(handle, at, size)
    except AttributeError:  # systems without it: the file grows, and a full disk is met by the write
        os.ftruncate(handle, at + size)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        os.ftruncate(handle, at + size)


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
