"""Rooms of bytes: what is written comes back, what is lent stays, and a disk that is full says so."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path

import pytest
import torch

from danlu.core.errors import InputError, Unhealthy
from danlu.memory import places
from danlu.memory.places import PAGE, File, Host


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    for place in (File(tmp_path), Host(pin=False)):
        rooms = [place.room(size) for size in (10, 3 * PAGE + 5, 0)]
        contents = [torch.arange(size, dtype=torch.int64).to(torch.uint8) for size in (10, 3 * PAGE + 5, 0)]
        for room, content in zip(rooms, contents):
            place.write(room, 0, content)
        place.write(rooms[1], 7, torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
        contents[1][7:11] = torch.tensor([1.5, -2.0], dtype=torch.bfloat16).view(torch.uint8)
        for room, content in zip(rooms, contents):
            assert torch.equal(place.lend(room), content)
            there = torch.empty(max(0, len(content) - 3), dtype=torch.uint8)
            place.read(room, 3, there)
            assert torch.equal(there, content[3:])


def test_what_a_file_lends_is_not_given_to_others(tmp_path: Path) -> None:
    file = File(tmp_path)
    room = file.room(PAGE)
    file.write(room, 0, torch.ones(PAGE, dtype=torch.uint8))
    lent = file.lend(room).view(torch.float32)[5:9]
    assert file.lent(room)
    other = file.another(room, PAGE)
    file.leave(room)
    assert other != room and file.room(PAGE) not in (room, other)
    file.write(other, 0, torch.zeros(PAGE, dtype=torch.uint8))
    assert torch.equal(lent.view(torch.uint8), torch.ones(16, dtype=torch.uint8))
    del lent
    gc.collect()
    assert not file.lent(room) and file.room(PAGE) == room


def test_a_file_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "for it"
    file = File(folder)
    file.write(file.room(100), 0, torch.ones(100, dtype=torch.uint8))
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"memory.offload_folder: nothing can be written in .*file/x \(not a dir"):
        File(tmp_path / "file" / "x")


def test_a_full_disk_is_met_where_room_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = File(tmp_path)
    first = file.room(PAGE)
    file.write(first, 0, torch.full((PAGE,), 7, dtype=torch.uint8))

    monkeypatch.setattr(os, "posix_fallocate", _full)
    with pytest.raises(Unhealthy, match=r"is full, so optimizer states cannot be kept there; free some room") as said:
        file.room(PAGE)
    assert not said.value.shared
    assert (file.lend(first) == 7).all()


def test_a_disk_without_room_for_all_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    file = File(tmp_path)
    file.reserve([1, PAGE, PAGE + 1])
    assert os.fstat(file._handle).st_size == 4 * PAGE
    monkeypatch.setattr(os, "posix_fallocate", lambda handle, at, size: asked.append((at, size)))
    assert [file.room(size) for size in (1, PAGE, PAGE + 1)] == [0, PAGE, 2 * PAGE]
    assert sum(size for _, size in asked) == 4 * PAGE
    monkeypatch.setattr(os, "posix_fallocate", _full)
    with pytest.raises(InputError, match=r"optimizer states take 8.2 kB in .* are free\); free some room") as said:
        file.reserve([PAGE, PAGE])
    assert str(tmp_path) in str(said.value)


def test_without_room_for_another_the_same_room_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = File(tmp_path)
    room = file.room(PAGE)
    lent = [file.lend(room)]
    monkeypatch.setattr(os, "posix_fallocate", _full)
    monkeypatch.setattr(places.time, "sleep", lambda _: lent.clear())
    assert file.another(room, PAGE) == room and not lent
    lent.append(file.lend(room))
    monkeypatch.setattr(places.time, "sleep", lambda _: None)
    monkeypatch.setattr(places, "PATIENCE_SECONDS", 0.0)
    with pytest.raises(Unhealthy, match="is full"):
        file.another(room, PAGE)


@pytest.mark.parametrize(("name", "error"), [("pwrite", errno.EIO), ("preadv", errno.EIO), ("pwrite", errno.ENOSPC)])
def test_a_disk_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: int) -> None:
    file = File(tmp_path)
    room = file.room(8)

    def fail(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, name, fail)
    with pytest.raises(Unhealthy, match="is full" if error == errno.ENOSPC else "input/output error"):
        (file.write if name == "pwrite" else file.read)(room, 0, torch.zeros(8, dtype=torch.uint8))


def test_short_reads_and_writes_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = File(tmp_path)
    room, content = file.room(100), torch.arange(100, dtype=torch.uint8)
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda handle, view, at: write(handle, view[:7], at))
    monkeypatch.setattr(os, "preadv", lambda handle, views, at: read(handle, [views[0][:11]], at))
    file.write(room, 0, content)
    there = torch.zeros(100, dtype=torch.uint8)
    file.read(room, 0, there)
    assert torch.equal(there, content)


def _full(*_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
