"""The few things done to a disk, in one place, so that tests can record, reorder or fail any one of them."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from danlu.core.paths import make_durable

FULL = (errno.ENOSPC, errno.EDQUOT)


class Disk:
    """The real disk. Every write of a checkpoint goes through one of these."""

    def make_folder(self, path: Path) -> None:
        """The folder is there; it may have been there before."""
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> int:
        """A new empty file, open for writing; an old one of that name is emptied."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def append(self, handle: int, content: bytes | memoryview) -> None:
        """All of the content stands at the file's end (a short write is gone on with)."""
        view = memoryview(content)
        while len(view):
            view = view[os.write(handle, view) :]

    def sync(self, handle: int) -> None:
        """What was appended is durable."""
        os.fsync(handle)

    def close(self, handle: int) -> None:
        os.close(handle)

    def rename(self, old: Path, new: Path) -> None:
        old.rename(new)

    def sync_folder(self, path: Path) -> None:
        """Names made, renamed or removed in the folder are durable, where the file system has a way to ask for it."""
        try:
            make_durable(path)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync a folder
                raise

    def remove(self, path: Path) -> None:
        """The file or the folder with all that is in it is gone, as far as the system lets us."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                path.unlink()

    def free(self, path: Path) -> int:
        """Bytes that may still be written below the path."""
        return shutil.disk_usage(path).free


def write_file(disk: Disk, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """The file holds exactly these chunks, durably. Its name is durable when its folder is synced."""
    handle = disk.create(path)
    try:
        for chunk in chunks:
            disk.append(handle, chunk)
        disk.sync(handle)
    finally:
        disk.close(handle)
