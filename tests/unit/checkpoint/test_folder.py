from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from danlu.checkpoint.disk import Disk
from danlu.checkpoint.folder import prune, remove_checkpoint, tidy, whole
from danlu.checkpoint.keep import Checkpoint
from danlu.checkpoint.save import Saver
from tests.unit.checkpoint.made import save, snapshot

ALL = Checkpoint(keep_last=-1, asynchronous=False)
ONE = Checkpoint(keep_last=1, keep_best=0)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_only_folders_with_a_manifest_of_their_step_count(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, settings=ALL, metrics={2: 0.5})
    (tmp_path / "step-000003" / "manifest.json").unlink()
    (tmp_path / "step-000004").mkdir()
    (tmp_path / "step-000005").write_text("a file")
    assert {step: found.metric for step, found in whole(tmp_path).items()} == {1: None, 2: 0.5}


def test_nothing_is_pruned_for_one_that_cannot_be_read_back(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, settings=ALL)
    manifest = tmp_path / "step-000002" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-1])
    assert prune(Disk(), tmp_path, 2, ONE) == ()
    assert names(tmp_path) == ["step-000001", "step-000002"]


def test_what_is_not_whole_is_neither_counted_nor_removed(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, settings=ALL)
    (tmp_path / "step-000002" / "manifest.json").unlink()
    two = Checkpoint(keep_last=2, keep_best=0)
    assert prune(Disk(), tmp_path, 3, two) == ()
    assert names(tmp_path) == ["step-000001", "step-000002", "step-000003"]


def test_one_that_a_run_left_with_pushes_out_none_and_goes_with_the_next(tmp_path: Path) -> None:
    two = Checkpoint(keep_last=2, keep_best=0, asynchronous=False)
    for step, due, left in [
        (1, True, [1]),
        (2, True, [1, 2]),
        (3, False, [1, 2, 3]),
        (4, False, [1, 2, 4]),
        (5, True, [2, 5]),
    ]:
        Saver(tmp_path, two).save(replace(snapshot(step), due=due))
        assert {s: manifest.due for s, manifest in whole(tmp_path).items()} == {s: s not in (3, 4) for s in left}


def test_a_removal_that_was_cut_off_does_not_stand_in_the_way(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, settings=ALL)
    (tmp_path / "del-000001").mkdir()
    (tmp_path / "del-000001" / "rank-000.json").write_text("left")
    remove_checkpoint(Disk(), tmp_path, 1)
    assert names(tmp_path) == ["step-000002"]


def test_tidying_keeps_what_another_rank_of_this_start_may_be_writing(tmp_path: Path) -> None:
    for name in ("tmp-000001-old-1", "tmp-000001-now-1", "del-000009"):
        (tmp_path / name).mkdir()
    (tmp_path / "mine.txt").write_text("not ours")
    tidy(Disk(), tmp_path, "now")
    assert names(tmp_path) == ["mine.txt", "tmp-000001-now-1"]


def test_one_moved_aside_goes_where_the_new_one_stands_and_comes_back_where_it_does_not(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, settings=ALL)
    (tmp_path / "step-000001").rename(tmp_path / "old-000001")
    (tmp_path / "step-000001").mkdir()  # the new one, without a manifest
    save(tmp_path / "other", 2)
    (tmp_path / "other" / "step-000002").rename(tmp_path / "old-000002")
    (tmp_path / "other").rmdir()
    tidy(Disk(), tmp_path)
    assert names(tmp_path) == ["step-000001", "step-000002"]
    assert set(whole(tmp_path)) == {1, 2}
