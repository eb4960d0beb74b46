"""How much memory this process was allotted: a container's limit, and its own address space."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

CGROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
NONE_FROM = 2**60  # version 1 writes a number of this size where there is no limit


class Limit(NamedTuple):
    """An upper bound of memory: bytes in all, and those not yet used."""

    total: int
    free: int


def limits(*, root: Path = CGROUPS, own: Path = OWN) -> list[Limit]:
    """Every bound that holds for this process; none where there are none, or where the system has no such things."""
    return [*_cgroups(root, own), *_address_space()]


def _address_space() -> Iterator[Limit]:
    """RLIMIT_AS: all that may be mapped, libraries included."""
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY:
        yield Limit(most, max(0, most - psutil.Process().memory_info().vms))


def _cgroups(root: Path, own: Path) -> Iterator[Limit]:
    """Limits of the process's control group and of those above it. Pages of files that can be dropped count as free."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        most, used, spare = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            if controllers
            else ("memory.max", "memory.current", "inactive_file")
        )
        folder = top / path.strip("/")
        while True:
            total, taken = _number(folder / most), _number(folder / used)
            if total is not None and taken is not None and total < NONE_FROM:
                taken -= _entry(folder / "memory.stat", spare)
                yield Limit(total, min(total, max(0, total - taken)))
            if folder == top:
                break
            folder = folder.parent


def _number(path: Path) -> int | None:
    """The number that a file holds; None where it is missing or says that there is no limit."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _entry(path: Path, name: str) -> int:
    """A named number of a file of such lines; 0 where it is missing."""
    try:
        rows = (line.split() for line in path.read_text().splitlines())
        return next((int(row[1]) for row in rows if len(row) == 2 and row[0] == name), 0)
    except (OSError, ValueError):
        return 0
