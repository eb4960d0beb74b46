"""The disk fails at any one of the things that are asked of it: what was safe stays, and the next save works."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from danlu.checkpoint.disk import Disk
from danlu.checkpoint.keep import Checkpoint
from danlu.checkpoint.load import newest
from danlu.checkpoint.save import NotSaved, Saved, Saver
from danlu.core.errors import InputError
from tests.fault.disks import Failing, mounted
from tests.unit.checkpoint.made import NOW, each_rank, holds, save, snapshot

KEEP = Checkpoint(keep_last=1, keep_best=0, asynchronous=False)


def whole(folder: Path, at_least: int, rows: int = 8) -> int:
    found = newest(folder)
    assert found is not None and found.step >= at_least and found.skipped == ()
    holds(found, rows)
    return found.step


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EINTR])
def test_any_operation_may_fail(tmp_path: Path, error: int) -> None:
    kinds = set()
    for k in range(100):
        folder = tmp_path / str(k)
        save(folder, 1, settings=KEEP)
        disk = Failing(-1, error)
        saver = Saver(folder, KEEP, disk=disk)
        disk.left = k
        [outcome] = saver.save(snapshot(2))
        if not disk.failed:
            assert isinstance(outcome, Saved)
            break
        kinds.add(type(outcome))
        whole(folder, 1 if isinstance(outcome, NotSaved) else 2)
        assert not list(folder.glob("tmp-*"))
        if isinstance(outcome, NotSaved):
            said = "the disk is full" if error == errno.ENOSPC else "injected"
            assert said in outcome.message and str(folder) in outcome.message
        disk.heal()
        [outcome] = saver.save(snapshot(3))
        assert isinstance(outcome, Saved) and whole(folder, 3) == 3
        assert [p.name for p in folder.iterdir()] == ["step-000003"]
    assert k > 12 and kinds == {Saved, NotSaved}  # Saved: where only the removal of older ones failed


def test_any_write_may_be_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may write less than it was given, and says how much."""
    write, calls, short = os.write, 0, 0

    def cut(handle: int, content: memoryview) -> int:
        nonlocal calls
        calls += 1
        return write(handle, content[: max(1, len(content) // 3)] if calls == short else content)

    monkeypatch.setattr(os, "write", cut)
    while calls >= short:
        short, calls = short + 1, 0
        folder = tmp_path / str(short)
        saver = Saver(folder, KEEP)
        assert isinstance(saver.save(snapshot(2, rows=300))[0], Saved) and whole(folder, 2, rows=300) == 2
    assert short > 8


def test_every_write_may_be_interrupted(tmp_path: Path) -> None:
    """A signal every half millisecond, as a profiler sends them."""
    before = signal.signal(signal.SIGALRM, lambda number, frame: None)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        save(tmp_path, 1, 2, settings=KEEP, rows=100_000)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert whole(tmp_path, 2, rows=100_000) == 2


def heal_once_failed(disk: Failing, over: threading.Event) -> None:
    while not disk.failed and not over.wait(0.002):
        pass
    over.wait(0.05)
    disk.heal()


@pytest.mark.parametrize("failing", [0, 1])
def test_any_operation_of_one_rank_may_fail_and_all_ranks_hear_of_it(tmp_path: Path, failing: int) -> None:
    for k in range(100):
        folder = tmp_path / str(k)
        save(folder, 1, world=2, settings=KEEP)
        disks = [Failing(-1), Failing(-1)]
        savers = [
            Saver(folder, KEEP, rank=rank, world=2, attempt="f", wait_seconds=20, disk=disks[rank]) for rank in range(2)
        ]
        disk = disks[failing]
        disk.left = k

        def work(rank: int, savers: list[Saver] = savers, disk: Failing = disk) -> list[Saved | NotSaved]:
            first = savers[rank].save(snapshot(2, rank, 2))
            if rank == failing:
                disk.heal()
            return first + savers[rank].save(snapshot(3, rank, 2))

        # The rank that fails can write its reason only when there is room again.
        over = threading.Event()
        mend = threading.Thread(target=heal_once_failed, args=(disk, over))
        mend.start()
        results = each_rank(2, work)
        over.set()
        mend.join()
        for result in results:
            assert isinstance(result, list), result
        assert results[0][1].step == results[1][1].step == 3 and whole(folder, 3) == 3
        if isinstance(
            results[1][0], Saved
        ):  # rank 0 alone knows whether the last step, the sync after the rename, failed
            assert whole(folder, 2)
        else:
            assert isinstance(results[0][0], NotSaved)
        if not disk.failed:
            break
    assert k > 3


@pytest.mark.parametrize("failing", [0, 1])
def test_a_disk_without_room_for_a_word_is_told_of_without_one_and_nobody_waits(tmp_path: Path, failing: int) -> None:
    """Names can still be made, but nothing be written: the other rank must hear of it now, not when there is room."""

    class Wordless(Disk):
        full = True

        def append(self, handle: int, content: bytes | memoryview) -> None:
            if self.full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().append(handle, content)

    save(tmp_path, 1, world=2, settings=KEEP)
    disk = Wordless()

    def work(rank: int) -> list[Saved | NotSaved]:
        mine = disk if rank == failing else Disk()
        disk.full = False
        saver = Saver(tmp_path, KEEP, rank=rank, world=2, attempt="w", wait_seconds=60, disk=mine)
        together.wait()
        disk.full = True
        first = saver.save(snapshot(2, rank, 2))
        together.wait()
        disk.full = False
        return first + saver.save(snapshot(3, rank, 2))

    together = threading.Barrier(2)
    begun = time.monotonic()
    results = each_rank(2, work)
    assert time.monotonic() - begun < 30
    for result in results:
        assert isinstance(result, list), result
        assert isinstance(result[0], NotSaved) and isinstance(result[1], Saved)
    assert whole(tmp_path, 3) == 3


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own of 3 MB."""
    with mounted(tmp_path / "small", kilobytes=3 * 1024) as place:
        yield place


def test_a_disk_that_is_really_full(small_disk: Path) -> None:
    rows = 24_000  # about 0.9 MB a checkpoint
    folder = small_disk / "checkpoints"
    saver = Saver(folder, Checkpoint(keep_last=2, keep_best=0))
    saver.save(snapshot(1, rows=rows))
    saver.save(snapshot(2, rows=rows))
    saver.finish()
    filler = small_disk / "filler"
    filler.write_bytes(bytes(1_000_000))
    saver.save(snapshot(3, rows=rows))
    [outcome] = saver.finish()
    assert isinstance(outcome, NotSaved) and "the disk is full" in outcome.message
    assert outcome.needed > 800_000 and 0 <= outcome.free < 300_000
    assert sorted(p.name for p in folder.iterdir()) == ["step-000001", "step-000002"]
    found = newest(folder)
    assert found is not None and found.step == 2
    holds(found, rows)
    with pytest.raises(InputError, match="free some room"):
        saver.room(outcome.needed)
    filler.unlink()
    saver.save(snapshot(4, rows=rows))
    [outcome] = saver.finish()
    assert isinstance(outcome, Saved)
    found = newest(folder)
    assert found is not None and found.step == 4


def test_a_folder_that_cannot_be_written_is_refused_at_start(small_disk: Path) -> None:
    save(small_disk / "checkpoints", 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(InputError, match=r"checkpoints cannot be written there \(Read-only file system\)"):
        Saver(small_disk / "checkpoints", NOW)
    assert os.listdir(small_disk / "checkpoints") == ["step-000001"]  # noqa: PTH208
    found = newest(small_disk / "checkpoints")
    assert found is not None and found.step == 1
