"""Disks that record what is done to them, fail at a chosen moment, or leave out what the protocol needs."""

from __future__ import annotations

import errno
import itertools
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from danlu.checkpoint.disk import Disk

Operation = tuple[str, str, str, bytes]  # what, path, second path, content


@contextmanager
def mounted(place: Path, *, kilobytes: int) -> Iterator[Path]:
    """A file system of its own of so many kB; where none can be mounted, the test skips and says why."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


class Recording(Disk):
    """The real disk, with a log of every operation below root, from any thread, in the order they were done."""

    def __init__(self, root: Path):
        self.root = root
        self.log: list[Operation] = []
        self._open: dict[int, str] = {}
        self._one = threading.RLock()

    def _say(self, what: str, path: Path | str, second: Path | str = "", content: bytes = b"") -> None:
        if isinstance(path, Path) and not path.is_relative_to(self.root):
            return
        names = [str(p.relative_to(self.root)) if isinstance(p, Path) else p for p in (path, second)]
        self.log.append((what, names[0], names[1], content))

    def make_folder(self, path: Path) -> None:
        with self._one:
            super().make_folder(path)
            self._say("make_folder", path)

    def create(self, path: Path) -> int:
        with self._one:
            handle = super().create(path)
            self._open[handle] = str(path.relative_to(self.root))
            self._say("create", path)
            return handle

    def append(self, handle: int, content: bytes | memoryview) -> None:
        with self._one:
            super().append(handle, content)
            self._say("append", self._open[handle], "", bytes(content))

    def sync(self, handle: int) -> None:
        with self._one:
            super().sync(handle)
            self._say("sync", self._open[handle])

    def close(self, handle: int) -> None:
        with self._one:
            super().close(handle)
            del self._open[handle]

    def rename(self, old: Path, new: Path) -> None:
        with self._one:
            super().rename(old, new)
            self._say("rename", old, new)

    def sync_folder(self, path: Path) -> None:
        with self._one:
            super().sync_folder(path)
            self._say("sync_folder", path)

    def remove(self, path: Path) -> None:
        with self._one:
            there = path.exists()
            super().remove(path)
            if there:
                self._say("remove", path)


class Failing(Disk):
    """Fails at the k-th operation that could fail, and at all after it until it is healed; writes a half before."""

    def __init__(self, at: int, error: int = errno.ENOSPC, only_writes: bool = False):
        self.left = at
        self.error = error
        self.only_writes = only_writes
        self.failed = False
        self._one = threading.Lock()

    def _may(self, writes: bool = False) -> None:
        with self._one:
            if self.left < 0 or (self.only_writes and not writes):
                return
            if self.left == 0:
                self.failed = True
                raise OSError(self.error, "injected")
            self.left -= 1

    def heal(self) -> None:
        self.left = -1

    def make_folder(self, path: Path) -> None:
        self._may()
        super().make_folder(path)

    def create(self, path: Path) -> int:
        self._may(writes=True)
        return super().create(path)

    def append(self, handle: int, content: bytes | memoryview) -> None:
        try:
            self._may(writes=True)
        except OSError:
            super().append(handle, memoryview(content)[: len(content) // 2])
            raise
        super().append(handle, content)

    def sync(self, handle: int) -> None:
        self._may(writes=True)
        super().sync(handle)

    def rename(self, old: Path, new: Path) -> None:
        self._may()
        super().rename(old, new)

    def sync_folder(self, path: Path) -> None:
        self._may()
        super().sync_folder(path)


Folder = dict[str, dict[str, bytes]]  # folder's name -> file's name -> content


class Model:
    """What a disk may hold after a power cut, given the operations that were begun before it.

    A file's bytes are sure once it is synced; until then all, half or none of them are there. The names of a folder are
    sure once it is synced; until then each new name and each rename may or may not have happened, independently. A
    removal may have happened at any time since it was asked for. Folders are followed by what they are, not by what
    they are called, so that a removal that reaches the disk before the rename before it destroys what had the old name.
    """

    def __init__(self, start: Folder, operations: list[Operation]):
        self.start, self.operations = start, operations

    def states(self, limit: int = 400) -> Iterator[Folder]:
        """Every such content (at most so many, evenly chosen)."""
        unsure_files, unsure_names, unsure_renames, removals = self._unsure()
        choices: list[list[tuple[str, str | int]]] = []
        choices += [[(f"file {f}", c) for c in ("full", "half", "none")] for f in unsure_files]
        choices += [[(f"name {f}", c) for c in ("there", "lost")] for f in unsure_names]
        choices += [[(f"rename {i}", c) for c in ("done", "lost")] for i in unsure_renames]
        choices += [[(f"remove {i}", c) for c in ("done", "lost")] for i in removals]
        total = 1
        for choice in choices:
            total *= len(choice)
        stride = max(1, total // limit)
        for combination in itertools.islice(itertools.product(*choices), 0, None, stride):
            yield self._apply({key: str(value) for key, value in combination})

    def _unsure(self) -> tuple[list[str], list[str], list[int], list[int]]:
        files: dict[str, None] = {}
        names: dict[str, None] = {}
        renames: list[int] = []
        removals: list[int] = []
        for index, (what, path, second, _) in enumerate(self.operations):
            if what == "create":
                files[path] = None
                names[path] = None
            elif what == "append":
                files[path] = None
            elif what == "sync":
                files.pop(path, None)
            elif what == "sync_folder" and path == ".":
                renames, removals = [], []
            elif what == "sync_folder":
                names = {n: None for n in names if not n.startswith(f"{path}/")}
            elif what == "rename":
                if "/" not in path:
                    renames.append(index)
                files = {_moved(n, path, second): None for n in files}
                names = {_moved(n, path, second): None for n in names}
            elif what == "remove":
                removals.append(index)
        return list(files), list(names), renames, removals

    def _apply(self, fate: dict[str, str]) -> Folder:
        """The disk under these fates. Names of files in fates are those they had at the end."""
        bodies: dict[int, dict[str, bytes]] = {i: dict(files) for i, files in enumerate(self.start.values())}
        names: dict[str, int] = {
            name: i for i, name in enumerate(self.start)
        }  # where each folder is, as programs see it
        kept: dict[str, int] = dict(names)  # where each folder is on the disk
        for index, (what, path, second, content) in enumerate(self.operations):
            folder, _, file = path.partition("/")
            if what == "make_folder" and path != "." and path not in names:
                names[path] = kept[path] = len(bodies)
                bodies[names[path]] = {}
            elif what == "create":
                bodies[names[folder]][file] = b""
            elif what == "append":
                bodies[names[folder]][file] += content
            elif what == "rename" and file:
                bodies[names[folder]][second.partition("/")[2]] = bodies[names[folder]].pop(file)
            elif what == "rename":
                names[second] = names.pop(path)
                # A name that still holds another folder cannot be taken: then this rename is not there either.
                if fate.get(f"rename {index}", "done") == "done" and path in kept and second not in kept:
                    kept[second] = kept.pop(path)
            elif what == "remove":
                done = fate.get(f"remove {index}", "done") == "done"
                if file:
                    removed = bodies.get(names.get(folder, -1), {}).pop(file, None)
                    if removed is not None and not done:
                        bodies[names[folder]][file] = removed
                elif path in names:
                    body = names.pop(path)
                    if done:
                        bodies[body] = {}
        at_end = {body: name for name, body in names.items()}
        disk: Folder = {}
        for name, body in kept.items():
            files = {}
            for file, content in bodies[body].items():
                path = f"{at_end.get(body, name)}/{file}"
                if fate.get(f"name {path}", "there") == "lost":
                    continue
                share = {"full": len(content), "half": len(content) // 2, "none": 0}[fate.get(f"file {path}", "full")]
                files[file] = content[:share]
            disk[name] = files
        return disk


def _moved(path: str, old: str, new: str) -> str:
    return new + path[len(old) :] if path == old or path.startswith(f"{old}/") else path


def read_folder(root: Path) -> Folder:
    """The content of a folder of checkpoints."""
    return {p.name: {f.name: f.read_bytes() for f in p.iterdir()} for p in sorted(root.iterdir()) if p.is_dir()}


def write_folder(root: Path, content: Folder) -> None:
    """The folder holds exactly this."""
    for name, files in content.items():
        (root / name).mkdir(parents=True)
        for file, data in files.items():
            (root / name / file).write_bytes(data)
