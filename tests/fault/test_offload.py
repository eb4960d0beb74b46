"""Optimizer states in a file: whatever happens to it or to the run, checkpoints are the truth, and nothing is lost."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fault import runs
from tests.fault.disks import mounted
from tests.fault.runs import Moment


@pytest.fixture(scope="module")
def unhurt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was left alone, with its states in memory."""
    recipe = runs.write_recipe(tmp_path_factory.mktemp("unhurt"), steps=9)
    assert runs.finish(recipe) == 0, runs.said(recipe)
    return recipe


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of its own, of so many kB. The states of the recipe take 279."""
    with mounted(tmp_path / "disk", kilobytes=request.param) as place:
        yield place


def in_a_file(folder: Path) -> list[str]:
    return ["memory.offload=[optimizer]", f"memory.offload_folder={folder}"]


@dataclass(frozen=True)
class Fails:
    """The disk of the states fails at a write, on one rank."""

    number: int
    error: int = errno.ENOSPC
    rank: int = 0

    def __call__(self) -> None:
        if int(os.environ.get("RANK", "0")) != self.rank:
            return
        whole, calls = os.pwrite, 0

        def write(*arguments: object) -> int:
            nonlocal calls
            calls += 1
            if calls == self.number:
                raise OSError(self.error, os.strerror(self.error))
            return whole(*arguments)  # type: ignore[arg-type]

        os.pwrite = write


def saved(recipe: Path) -> list[str]:
    return sorted(path.name for path in (runs.folder(recipe) / "checkpoints").glob("step-*"))


def test_a_run_with_states_in_a_file_is_the_run_without(unhurt: Path, tmp_path: Path) -> None:
    recipe = runs.write_recipe(tmp_path, steps=9)
    assert runs.finish(recipe, *in_a_file(tmp_path / "states")) == 0, runs.said(recipe)
    runs.same(recipe, unhurt)
    assert list((tmp_path / "states").iterdir()) == []


@pytest.mark.parametrize(("error", "said"), [(errno.ENOSPC, "is full"), (errno.EIO, "fails (input/output error)")])
def test_a_disk_that_fails_in_an_update_loses_nothing(unhurt: Path, tmp_path: Path, error: int, said: str) -> None:
    recipe = runs.write_recipe(tmp_path, steps=9)
    states = in_a_file(tmp_path / "states")
    assert runs.finish(recipe, *states, prepare=Fails(200, error)) == 3
    [line] = [line for line in runs.said(recipe).splitlines() if "offload_folder" in line]
    assert f"{tmp_path / 'states'} {said}" in line and "the same command goes on" in line
    assert saved(recipe)[-1] in ("step-000003", "step-000006")
    assert runs.finish(recipe, *states) == 0, runs.said(recipe)
    runs.same(recipe, unhurt)


def test_killed_while_states_are_written_and_gone_on_without_a_file(unhurt: Path, tmp_path: Path) -> None:
    recipe = runs.write_recipe(tmp_path, steps=9)
    states = in_a_file(tmp_path / "states")
    for number in (3, 170, 90):
        assert runs.finish(recipe, *states, prepare=Moment("danlu.memory.places", "File.write", number)) == -9
        assert list((tmp_path / "states").iterdir()) == [], "a killed run has left something behind"
    assert runs.finish(recipe, "memory.offload=[]", "memory.offload_folder=null") == 0, runs.said(recipe)
    assert "memory.offload: was ['optimizer'], is [] from here on" in runs.said(recipe)
    runs.same(recipe, unhurt)


@pytest.mark.parametrize("disk", [100], indirect=True)
def test_a_disk_too_small_is_refused_before_the_first_update(disk: Path, tmp_path: Path) -> None:
    recipe = runs.write_recipe(tmp_path, steps=9)
    assert runs.finish(recipe, *in_a_file(disk)) == 2
    assert "memory.offload_folder: optimizer states take" in runs.said(recipe)
    assert "are free); free some room, or give another folder" in runs.said(recipe)
    assert not saved(recipe)


def slowly() -> None:
    """Each save takes longer than an update."""
    from danlu.checkpoint import commit

    whole = commit.write_part

    def slow(*arguments: object, **named: object) -> object:
        time.sleep(0.3)
        return whole(*arguments, **named)  # type: ignore[arg-type]

    commit.write_part = slow  # type: ignore[assignment]


@pytest.mark.parametrize("disk", [340], indirect=True)
def test_a_disk_without_room_for_a_save_under_way_makes_the_update_wait(
    unhurt: Path, disk: Path, tmp_path: Path
) -> None:
    """What is being saved is not written over: there is no room beside it, so it is waited for."""
    recipe = runs.write_recipe(tmp_path, steps=9)
    assert runs.finish(recipe, *in_a_file(disk), prepare=slowly) == 0, runs.said(recipe)
    runs.same(recipe, unhurt)


@pytest.mark.parametrize("disk", [1000], indirect=True)
def test_a_disk_that_cannot_be_written_is_refused(disk: Path, tmp_path: Path) -> None:
    recipe = runs.write_recipe(tmp_path, steps=9)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert runs.finish(recipe, *in_a_file(disk)) == 2
    assert "nothing can be written in" in runs.said(recipe) and "read-only file system" in runs.said(recipe)


def test_one_rank_whose_disk_fails_ends_all_and_nothing_is_lost(tmp_path: Path) -> None:
    reference = runs.write_recipe(tmp_path / "unhurt", steps=9)
    assert runs.finish(reference, ranks=2) == 0, runs.said(reference)
    recipe = runs.write_recipe(tmp_path / "hurt", steps=9)
    states = in_a_file(tmp_path / "states")
    codes = runs.end(runs.start(recipe, *states, prepare=Fails(200, rank=1), ranks=2), seconds=60)
    assert codes == [1, 3], runs.said(recipe)
    assert "is full" in runs.said(recipe) and "another rank failed" in runs.said(recipe)
    assert runs.finish(recipe, *states, ranks=2) == 0, runs.said(recipe)
    runs.same(recipe, reference)
