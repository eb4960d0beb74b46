from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from danlu.checkpoint.lock import Lock
from danlu.core.errors import InputError

HOLD = """
import sys, time
from pathlib import Path
from danlu.checkpoint.lock import Lock
lock = Lock(Path(sys.argv[1]))
"""


def holder(path: Path, then: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD + then, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process


def test_the_second_run_is_refused_and_told_by_whom(tmp_path: Path) -> None:
    path = tmp_path / "run" / ".lock"
    with Lock(path), pytest.raises(InputError, match=rf"{path.parent}: .* \(process {os.getpid()} on \S+\)"):
        Lock(path)
    Lock(path).release()


def test_folders_made_for_it_are_gone_with_it_unless_something_else_is_in_them(tmp_path: Path) -> None:
    Lock(tmp_path / "runs" / "a" / ".lock").release()
    assert list(tmp_path.iterdir()) == []
    with Lock(tmp_path / "runs" / "a" / ".lock"):
        (tmp_path / "runs" / "a" / "recipe.yaml").touch()
    with Lock(tmp_path / "runs" / "b" / ".lock"):
        pass
    assert sorted(path.name for path in tmp_path.rglob("*")) == [".lock", "a", "recipe.yaml", "runs"]
    (tmp_path / "mine").mkdir()
    Lock(tmp_path / "mine" / ".lock").release()
    assert (tmp_path / "mine").is_dir()


def test_a_lock_on_a_file_that_was_taken_away_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between another's opening of the file and its lock, the holder takes the file away with its folder."""
    path, lock, taken = tmp_path / "run" / ".lock", fcntl.flock, []

    def late(handle: int, how: int) -> None:
        if len(taken) == 1:
            taken.append("the other's")
            taken[0].release()
        lock(handle, how)

    taken.append(Lock(path))
    monkeypatch.setattr(fcntl, "flock", late)
    with Lock(path):
        monkeypatch.undo()
        with pytest.raises(InputError):
            Lock(path)


def test_a_killed_run_leaves_nothing_locked_even_with_a_child_alive(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    # The run forks a worker, says the worker's number, and is killed; the worker lives on.
    process = holder(path, "import os\npid = os.fork()\nif pid: print(pid, flush=True)\ntime.sleep(60)")
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    try:
        with pytest.raises(InputError, match=f"process {process.pid} on"):
            Lock(path)
        process.kill()
        process.wait()
        deadline = time.monotonic() + 10
        while True:
            try:
                Lock(path).release()
                break
            except InputError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        os.kill(worker, 0)
    finally:
        process.kill()
        os.kill(worker, signal.SIGKILL)


def test_another_thread_of_writing_in_the_file_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    path.write_text("not json")
    with Lock(path):
        assert str(os.getpid()) in path.read_text()
