"""Every state that a power cut during a save can leave on the disk: the newest whole checkpoint is never lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from danlu.checkpoint import commit as protocol
from danlu.checkpoint.disk import Disk
from danlu.checkpoint.folder import remove_checkpoint, tidy, whole
from danlu.checkpoint.keep import Checkpoint
from danlu.checkpoint.load import newest
from danlu.checkpoint.manifest import step_name, verify
from danlu.checkpoint.save import Saved, Saver
from danlu.core.errors import InputError
from tests.fault.disks import Folder, Model, Recording, read_folder, write_folder
from tests.unit.checkpoint.made import each_rank, holds, save, snapshot

KEEP = Checkpoint(keep_last=1, keep_best=0, asynchronous=False)


def record(root: Path, step: int, world: int, kind: type[Recording] = Recording) -> tuple[Folder, Recording]:
    """What was on the disk before the step was saved, and all that saving it did to the disk."""
    disk = kind(root)
    savers = [Saver(root, KEEP, rank=r, world=world, attempt="u", wait_seconds=20, disk=disk) for r in range(world)]
    before = read_folder(root)
    disk.log.clear()
    results = each_rank(world, lambda rank: savers[rank].save(snapshot(step, rank, world)))
    assert all(isinstance(result, list) and result[0].step == step for result in results), results
    return before, disk


def crash_everywhere(root: Path, before: Folder, disk: Recording, old: int, new: int) -> tuple[int, list[str]]:
    """How many states were looked at, and what was wrong in which."""
    checked, faults, seen = 0, [], set()
    for cut in range(len(disk.log) + 1):
        for state in Model(before, disk.log[:cut]).states():
            key = repr((sorted((n, sorted(f.items())) for n, f in state.items()), cut == len(disk.log)))
            if key in seen:
                continue
            seen.add(key)
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir()
            write_folder(root, state)
            checked += 1
            where = f"after {disk.log[cut - 1][:2] if cut else 'nothing'}"
            try:
                found = newest(root)
            except InputError:
                found = None
            if found is None or found.step < old:
                faults.append(f"lost {where}")
                continue
            holds(found)
            if cut == len(disk.log) and found.step != new:
                faults.append(f"a save that had returned is not there {where}")
                continue
            if checked % 15 == 0 or cut == len(disk.log):  # the run goes on from there
                step = found.step + 1
                save(root, step, settings=KEEP)
                after = newest(root)
                if after is None or after.step != step or [p.name for p in root.iterdir()] != [after.path.name]:
                    faults.append(f"could not go on {where}")
    return checked, faults


@pytest.mark.parametrize("world", [1, 2])
def test_no_crash_loses_a_checkpoint(tmp_path: Path, world: int) -> None:
    root = tmp_path / "checkpoints"
    save(root, 1, world=world, settings=KEEP)
    before, disk = record(root, 2, world)
    checked, faults = crash_everywhere(tmp_path / "crashed", before, disk, 1, 2)
    print(f"{len(disk.log)} operations, {checked} states, {len(faults)} bad")
    assert checked > 30 and not faults, faults[:5]


def test_no_crash_loses_a_checkpoint_that_is_saved_anew(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    save(root, 1, settings=KEEP)
    before, disk = record(root, 1, 1)
    assert ("rename", "step-000001", "old-000001", b"") in disk.log
    checked, faults = crash_everywhere(tmp_path / "crashed", before, disk, 1, 1)
    assert checked > 20 and not faults, faults[:5]


def test_no_crash_loses_the_newest_or_the_best_while_older_ones_go(tmp_path: Path) -> None:
    """Saved is a new best: one that was the best until then, and one that was the last but one, are removed."""
    settings, root = Checkpoint(keep_last=1, keep_best=1, asynchronous=False), tmp_path / "checkpoints"
    save(root, 1, settings=settings, metrics={1: 3.0})
    save(root, 2, settings=settings, metrics={2: 4.0})
    assert sorted(path.name for path in root.iterdir()) == ["step-000001", "step-000002"]
    disk = Recording(root)
    saver, before = Saver(root, settings, disk=disk), read_folder(root)
    disk.log.clear()
    [outcome] = saver.save(snapshot(3, metric=2.0))
    assert isinstance(outcome, Saved) and outcome.removed == ("step-000001", "step-000002")
    checked = 0
    for cut in range(len(disk.log) + 1):
        for state in Model(before, disk.log[:cut]).states():
            shutil.rmtree(tmp_path / "crashed", ignore_errors=True)
            (tmp_path / "crashed").mkdir()
            write_folder(tmp_path / "crashed", state)
            tidy(Disk(), tmp_path / "crashed")
            good = {
                step: m
                for step, m in whole(tmp_path / "crashed").items()
                if not verify(tmp_path / "crashed" / step_name(step))
            }
            best = min(good, key=lambda step: good[step].metric or 9)
            assert max(good) >= 2 and best == (3 if 3 in good else 1), (disk.log[cut - 1][:2], good)
            checked += 1
    print(f"{len(disk.log)} operations, {checked} states")
    assert checked > 40


class Unsynced(Recording):
    """Files are never synced."""

    def sync(self, handle: int) -> None: ...


class FoldersUnsynced(Recording):
    """Names are never synced."""

    def sync_folder(self, path: Path) -> None: ...


class PartsUnsynced(Recording):
    """The names of the files in the new checkpoint are never synced."""

    def sync_folder(self, path: Path) -> None:
        if path == self.root:
            super().sync_folder(path)


class ParentUnsynced(Recording):
    """The rename is never synced."""

    def sync_folder(self, path: Path) -> None:
        if path != self.root:
            super().sync_folder(path)


def _in_place(job: protocol.Job, tables: list[tuple[int, str]]) -> None:
    """Commits by writing over what is there."""
    final = job.root / protocol.step_name(job.step)
    job.disk.make_folder(final)
    for path in sorted(job.folder.iterdir()):
        protocol.write_file(job.disk, final / path.name, [path.read_bytes()])
    facts = {"step": job.step, "world": job.world, "attempt": job.attempt, "metric": None, "facts": job.facts}
    content = protocol.write_manifest(protocol.Manifest(tables=tuple(tables), **facts))
    protocol.write_file(job.disk, final / protocol.MANIFEST, [content])
    job.disk.sync_folder(final)
    job.disk.remove(job.folder)
    job.disk.sync_folder(job.root)


def _prune_first(write: Callable[[protocol.Job], None]) -> Callable[[protocol.Job], None]:
    def wrong(job: protocol.Job) -> None:
        remove_checkpoint(job.disk, job.root, job.step - 1)
        write(job)

    return wrong


@pytest.mark.parametrize("mutant", [Unsynced, FoldersUnsynced, PartsUnsynced, ParentUnsynced])
def test_a_protocol_that_forgets_to_sync_is_caught(tmp_path: Path, mutant: type[Recording]) -> None:
    root = tmp_path / "checkpoints"
    save(root, 1, settings=KEEP)
    before, disk = record(root, 2, 1, mutant)
    _, faults = crash_everywhere(tmp_path / "crashed", before, disk, 1, 2)
    assert any(fault.startswith(("lost", "a save that had returned is not there")) for fault in faults)


def test_overwriting_in_place_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "checkpoints"
    save(root, 1, settings=KEEP)
    monkeypatch.setattr(protocol, "commit", _in_place)
    before, disk = record(root, 1, 1)
    monkeypatch.undo()
    _, faults = crash_everywhere(tmp_path / "crashed", before, disk, 1, 1)
    assert any(fault.startswith("lost") for fault in faults)


def test_removing_the_old_one_first_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "checkpoints"
    save(root, 1, settings=KEEP)
    monkeypatch.setattr(protocol, "write_part", _prune_first(protocol.write_part))
    before, disk = record(root, 2, 1)
    monkeypatch.undo()
    _, faults = crash_everywhere(tmp_path / "crashed", before, disk, 1, 2)
    assert any(fault.startswith("lost") for fault in faults)
