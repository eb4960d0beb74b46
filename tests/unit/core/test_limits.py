"""What a process may take of memory, by its control group and its own limit."""

from __future__ import annotations

import resource
from pathlib import Path

import psutil
import pytest
import torch

from danlu.core import device, limits
from danlu.core.limits import Limit


def _group(folder: Path, total: object, used: int, *, names: tuple[str, str], stat: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{total}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(stat)


V2 = ("memory.max", "memory.current")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def test_version_2_counts_every_group_above(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/job/task\n")
    _group(tmp_path / "job", 5000, 1500, names=V2, stat="anon 7\ninactive_file 500\n")
    _group(tmp_path / "job" / "task", "max", 900, names=V2, stat="")
    found = limits.limits(root=tmp_path, own=own)
    assert found == [Limit(5000, 5000 - (1500 - 500))]


def test_version_1_has_its_own_names_and_a_huge_number_for_none(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("5:cpu:/other\n4:memory:/job\n0::/\n")
    _group(tmp_path / "memory" / "job", 4000, 3000, names=V1, stat="total_inactive_file 0\n")
    _group(tmp_path / "memory", 9223372036854771712, 3000, names=V1, stat="")
    assert limits.limits(root=tmp_path, own=own) == [Limit(4000, 1000)]


def test_a_group_in_a_namespace_of_its_own_is_the_root(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/\n")
    _group(tmp_path, 700, 900, names=V2, stat="inactive_file 0\n")
    assert limits.limits(root=tmp_path, own=own) == [Limit(700, 0)]


def test_a_system_without_groups_has_no_limits(tmp_path: Path) -> None:
    assert limits.limits(root=tmp_path, own=tmp_path / "none") == []


def test_the_address_space_bounds_what_a_device_has_free(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = psutil.Process().memory_info().vms
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (taken + 10_000_000, resource.RLIM_INFINITY))
    found = device.memory(torch.device("cpu"))
    assert found.total <= taken + 10_000_000 and found.free <= 10_000_000
