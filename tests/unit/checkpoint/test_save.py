from __future__ import annotations

import errno
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from danlu.checkpoint.disk import Disk
from danlu.checkpoint.keep import Checkpoint
from danlu.checkpoint.load import Want, newest, read
from danlu.checkpoint.pieces import Piece
from danlu.checkpoint.save import NotSaved, Saved, Saver, Snapshot
from danlu.core.errors import Failure, InputError
from tests.unit.checkpoint.made import NOW, each_rank, holds, save, snapshot


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_saved_is_there_whole(tmp_path: Path, world: int, asynchronous: bool) -> None:
    outcomes = save(tmp_path, 100, 200, world=world, settings=Checkpoint(asynchronous=asynchronous))
    assert [[o.step for o in rank] for rank in outcomes] == [[100, 200]] * world
    assert names(tmp_path) == ["step-000100", "step-000200"]
    files = names(tmp_path / "step-000200")
    assert files == sorted(
        ["manifest.json", *(f"rank-{r:03d}.{e}" for r in range(world) for e in ("json", "safetensors"))]
    )
    found = newest(tmp_path)
    assert found is not None and found.step == 200 and found.manifest.world == world
    holds(found)


def test_training_may_change_its_tensors_once_save_has_returned(tmp_path: Path) -> None:
    begun, go = threading.Event(), threading.Event()

    class Slow(Disk):
        def create(self, path: Path) -> int:
            if path.suffix == ".safetensors":
                begun.set()
                assert go.wait(20)
            return super().create(path)

    weight = torch.arange(6.0)
    facts = {"samples": [1, 2]}
    saver = Saver(tmp_path, Checkpoint(), disk=Slow())
    assert saver.save(Snapshot(step=1, pieces={"w": Piece.whole(weight)}, facts=facts)) == []
    assert begun.wait(20)
    weight.fill_(-1.0)
    facts["samples"].append(3)
    go.set()
    [outcome] = saver.finish()
    assert isinstance(outcome, Saved) and outcome.stall_seconds < outcome.seconds
    found = newest(tmp_path)
    assert found is not None and found.manifest.facts == {"samples": [1, 2]}
    from danlu.checkpoint.load import Want, read

    assert torch.equal(read(found, {"w": Want.whole(weight)})["w"], torch.arange(6.0))


def test_one_save_in_flight_and_its_outcome_told_once(tmp_path: Path) -> None:
    saver = Saver(tmp_path, Checkpoint())
    assert saver.save(snapshot(1)) == []
    [first] = saver.save(snapshot(2))
    [second] = saver.finish()
    assert (first.step, second.step) == (1, 2)
    assert saver.finish() == []


def test_a_failure_in_the_background_is_raised_at_the_next_call(tmp_path: Path) -> None:
    class Broken(Disk):
        def append(self, handle: int, content: bytes | memoryview) -> None:
            raise RuntimeError("a fault of ours")

    saver = Saver(tmp_path, Checkpoint())
    saver._disk = Broken()
    saver.save(snapshot(1))
    with pytest.raises(Failure, match="rank 0 could not save step 1: RuntimeError\\('a fault of ours'\\)"):
        saver.save(snapshot(2))
    saver._disk = Disk()
    saver.save(snapshot(3))
    assert [o.step for o in saver.finish()] == [3]
    assert names(tmp_path) == ["step-000003"]


def test_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 5)
    shard = tmp_path / "step-000005" / "rank-000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    save(tmp_path, 5)
    found = newest(tmp_path)
    assert found is not None and found.skipped == ()
    holds(found)
    assert names(tmp_path) == ["step-000005"]


def test_over_what_an_aborted_try_left(tmp_path: Path) -> None:
    (tmp_path / "step-000007").mkdir()
    (tmp_path / "step-000007" / "rank-000.safetensors").write_bytes(b"part")
    (tmp_path / "tmp-000007-99-1").mkdir()
    (tmp_path / "tmp-000007-99-1" / "rank-001.json").write_bytes(b"{}")
    (tmp_path / "del-000003").mkdir()
    save(tmp_path, 7, world=2)
    assert names(tmp_path) == ["step-000007"]
    found = newest(tmp_path)
    assert found is not None
    holds(found)


def test_retention(tmp_path: Path) -> None:
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: 2.5, 5: 2.6}
    outcomes = save(
        tmp_path, *losses, metrics=losses, settings=Checkpoint(keep_last=2, keep_best=1, asynchronous=False)
    )
    assert names(tmp_path) == ["step-000002", "step-000004", "step-000005"]
    assert [o.removed for o in outcomes[0]] == [(), (), ("step-000001",), (), ("step-000003",)]


@pytest.mark.parametrize(("keep", "left"), [(-1, 4), (1, 1)])
def test_keep_all_and_keep_one(tmp_path: Path, keep: int, left: int) -> None:
    save(tmp_path, 1, 2, 3, 4, settings=Checkpoint(keep_last=keep, keep_best=0, asynchronous=False))
    assert names(tmp_path) == [f"step-{s:06d}" for s in range(1, 5)][-left:]


def test_the_only_other_is_not_removed_before_the_new_one_was_read_back(tmp_path: Path) -> None:
    class Careless(Disk):
        """Loses a bit of what it writes."""

        def append(self, handle: int, content: bytes | memoryview) -> None:
            changed = bytearray(content)
            if len(changed) > 1000:
                changed[-1] ^= 1
            super().append(handle, changed)

    settings = Checkpoint(keep_last=1, keep_best=0, asynchronous=False)
    save(tmp_path, 1, settings=settings, rows=200)
    save(tmp_path, 2, settings=settings, rows=200, disks={0: Careless()})
    assert names(tmp_path) == ["step-000001", "step-000002"]
    found = newest(tmp_path)
    assert found is not None and found.step == 1 and "step-000002 was skipped" in found.skipped[0]
    save(tmp_path, 3, settings=settings, rows=200)
    found = newest(tmp_path)
    assert found is not None and found.step == 3


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    def work(rank: int) -> object:
        if rank in (1, 3):
            return None
        saver = Saver(tmp_path, NOW, rank=rank, world=4, attempt="a", wait_seconds=0.5)
        return saver.save(snapshot(1, rank, 4))

    results = each_rank(4, work)
    assert isinstance(results[0], Failure) and "waited 0 s for ranks 1, 3" in str(results[0])
    assert isinstance(results[2], Failure)
    assert newest(tmp_path) is None


def test_abandon_ends_the_wait(tmp_path: Path) -> None:
    saver = Saver(tmp_path, Checkpoint(), rank=0, world=2, attempt="a", wait_seconds=600)
    saver.save(snapshot(1, 0, 2))
    begun = time.monotonic()
    saver.abandon()
    with pytest.raises(Failure, match="for rank 1"):
        saver.finish()
    assert time.monotonic() - begun < 5


def test_nothing_is_committed_before_every_ranks_table_is_durable(tmp_path: Path) -> None:
    class Late(Disk):
        """The sync of a table takes its time, and fails."""

        tables: set[int]

        def create(self, path: Path) -> int:
            handle = super().create(path)
            self.tables = {handle} if ".json" in path.name else set()
            return handle

        def sync(self, handle: int) -> None:
            if handle in self.tables:
                self.tables = set()
                time.sleep(0.2)
                raise OSError(errno.EIO, "injected")
            super().sync(handle)

    def work(rank: int) -> object:
        disk = Late() if rank == 1 else Disk()
        return Saver(tmp_path, NOW, rank=rank, world=2, attempt="a", wait_seconds=20, disk=disk).save(
            snapshot(1, rank, 2)
        )

    for result in each_rank(2, work):
        assert isinstance(result, list) and isinstance(result[0], NotSaved), result
    assert newest(tmp_path) is None


def test_ranks_that_do_not_agree_on_facts_save_nothing(tmp_path: Path) -> None:
    def work(rank: int) -> object:
        saver = Saver(tmp_path, NOW, rank=rank, world=2, attempt="a", wait_seconds=20)
        shot = snapshot(1, rank, 2)
        return saver.save(Snapshot(step=1, pieces=shot.pieces, facts={"samples": rank}))

    results = each_rank(2, work)
    for result in results:
        assert isinstance(result, Failure) and "ranks [1] do not agree with rank 0" in str(result)
    assert newest(tmp_path) is None


def test_slices_that_leave_a_gap_or_overlap_are_refused(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    saver = Saver(tmp_path, NOW)
    gap = {"w": Piece(tensor=whole[:3], shape=(4, 3), offset=(0, 0))}
    with pytest.raises(Failure, match="w: parts of it were not given"):
        saver.save(Snapshot(step=1, pieces=gap, facts={}))

    def work(rank: int) -> object:
        saver = Saver(tmp_path, NOW, rank=rank, world=2, attempt="a", wait_seconds=20)
        return saver.save(Snapshot(step=1, pieces={"w": Piece.whole(whole)}, facts={}))

    for result in each_rank(2, work):
        assert isinstance(result, Failure) and "w: parts of it were given twice" in str(result)


def test_facts_that_are_not_json_and_metrics_that_are_not_numbers_are_refused(tmp_path: Path) -> None:
    saver = Saver(tmp_path, NOW)
    with pytest.raises(ValueError):
        saver.save(Snapshot(step=1, pieces={}, facts={"loss": float("nan")}))
    with pytest.raises(ValueError, match="a metric of inf"):
        saver.save(Snapshot(step=1, pieces={}, facts={}, metric=float("inf")))


def test_going_back_drops_what_lies_ahead(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, settings=Checkpoint(keep_last=-1, asynchronous=False))
    saver = Saver(tmp_path, NOW)
    assert saver.drop_after(1) == ["step-000002", "step-000003"]
    assert names(tmp_path) == ["step-000001"]


def test_what_lies_ahead_is_neither_counted_nor_removed(tmp_path: Path) -> None:
    everything = Checkpoint(keep_last=-1, asynchronous=False)
    save(tmp_path, 10, 900, 1000, settings=everything)
    save(tmp_path, 20, settings=Checkpoint(keep_last=2, keep_best=0, asynchronous=False))
    assert names(tmp_path) == ["step-000010", "step-000020", "step-000900", "step-001000"]


def test_room_is_told_and_too_little_is_refused(tmp_path: Path) -> None:
    class Small(Disk):
        def free(self, path: Path) -> int:
            return 3_000_000_000

    saver = Saver(tmp_path, Checkpoint(keep_last=2, keep_best=1), disk=Small())
    line = saver.room(500_000_000)
    assert line == f"checkpoints: 500.0 MB each, at most 2.50 GB at once; 3.00 GB free in {tmp_path}"
    assert "NOT ENOUGH" in saver.room(1_000_000_000)
    with pytest.raises(InputError, match=r"takes 4.00 GB and only 3.00 GB are free"):
        saver.room(4_000_000_000)


@pytest.mark.parametrize("kind", ["file", "loop"])
def test_a_folder_that_cannot_be_one_is_refused_at_start(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "checkpoints"
    if kind == "file":
        target.write_text("")
    else:
        target.symlink_to(target)
    with pytest.raises(InputError, match=f"{target}: checkpoints cannot be written there"):
        Saver(target, NOW)


def test_a_full_disk_is_told_with_path_and_bytes(tmp_path: Path) -> None:
    class Full(Disk):
        def append(self, handle: int, content: bytes | memoryview) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        def free(self, path: Path) -> int:
            return 12

    save(tmp_path, 1)
    saver = Saver(tmp_path, Checkpoint())
    saver._disk = Full()
    saver.save(snapshot(2))
    [outcome] = saver.finish()
    assert isinstance(outcome, NotSaved)
    needed = snapshot(2).size
    assert (outcome.step, outcome.needed, outcome.free) == (2, needed, 12)
    assert str(tmp_path) in outcome.message and "the disk is full" in outcome.message
    assert names(tmp_path) == ["step-000001"]


def test_what_is_still_is_not_copied(tmp_path: Path) -> None:
    """Shown by breaking the promise: what is written to it after all is what is saved."""
    begun, go = threading.Event(), threading.Event()

    class Slow(Disk):
        def create(self, path: Path) -> int:
            if path.suffix == ".safetensors":
                begun.set()
                assert go.wait(20)
            return super().create(path)

    still, moving = torch.arange(6.0), torch.arange(6.0)
    saver = Saver(tmp_path, Checkpoint(), disk=Slow())
    pieces = {"still": replace(Piece.whole(still), still=True), "moving": Piece.whole(moving)}
    saver.save(Snapshot(step=1, pieces=pieces, facts={}))
    assert begun.wait(20)
    still.fill_(-1.0)
    moving.fill_(-1.0)
    go.set()
    [outcome] = saver.finish()
    found = newest(tmp_path)
    assert isinstance(outcome, Saved) and found is not None
    read_back = read(found, {name: Want.whole(still) for name in pieces})
    assert torch.equal(read_back["still"], still) and torch.equal(read_back["moving"], torch.arange(6.0))


def test_what_came_of_a_save_is_known_as_soon_as_it_is_over(tmp_path: Path) -> None:
    go = threading.Event()

    class Slow(Disk):
        def create(self, path: Path) -> int:
            assert go.wait(20)
            return super().create(path)

    saver = Saver(tmp_path, Checkpoint(), disk=Disk())
    assert saver.ready() == []
    saver._disk = Slow()
    assert saver.save(snapshot(7)) == [] and saver.ready() == []
    go.set()
    until = time.monotonic() + 20
    while not (done := saver.ready()):
        assert time.monotonic() < until
    assert [outcome.step for outcome in done] == [7] and saver.ready() == saver.finish() == []
