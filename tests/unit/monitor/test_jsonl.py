"""Lines that survive crashes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danlu.monitor import jsonl


def write(path: Path, steps: range) -> None:
    file = jsonl.Lines(path)
    for step in steps:
        file.add({"step": step, "text": "火" * (step % 5)})
    file.close()


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text(encoding="utf-8").splitlines()]


@given(lost=st.integers(0, 400))
@settings(max_examples=60, deadline=None)
def test_wherever_the_file_was_torn_the_next_lines_are_whole(tmp_path_factory, lost):
    path = tmp_path_factory.mktemp("torn") / "metrics.jsonl"
    write(path, range(1, 13))
    whole = path.read_bytes()
    torn = whole[: max(0, len(whole) - lost)]
    path.write_bytes(torn)
    kept = torn.count(b"\n")
    write(path, range(kept + 1, 16))
    assert steps_of(path) == list(range(1, 16))


def test_cut_leaves_nothing_beyond_the_step_and_no_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 31))
    with open(path, "ab") as file:
        file.write(b'{"step": 31, "lo')
    jsonl.cut(path, 20)
    assert steps_of(path) == list(range(1, 21))
    jsonl.cut(path, 25)
    assert steps_of(path) == list(range(1, 21))
    jsonl.cut(path, 0)
    assert path.read_bytes() == b""
    jsonl.cut(path, 0)
    jsonl.cut(tmp_path / "none.jsonl", 3)


def test_cut_is_quick_however_long_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    line = b'{"step": %d, "loss": 1.0}\n'
    path.write_bytes(b"".join(line % step for step in range(1, 200_001)))
    read = []
    parse = jsonl._parse
    jsonl._parse = lambda content: read.append(1) or parse(content)  # type: ignore[assignment]
    try:
        jsonl.cut(path, 199_990)
    finally:
        jsonl._parse = parse
    assert len(read) == 11  # what is cut, and the line that stays
    assert path.stat().st_size == len(b"".join(line % step for step in range(1, 199_991)))


def test_numbers_that_json_has_not_are_refused_and_leave_no_trace(tmp_path):
    file = jsonl.Lines(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="JSON"):
        file.add({"loss": float("nan")})
    file.add({"loss": 1.0})
    file.close()
    assert list(jsonl.lines(tmp_path / "metrics.jsonl")) == [{"loss": 1.0}]


def test_a_full_disk_leaves_no_half_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = jsonl.Lines(path)
    file.add({"step": 1})
    real = file._file

    class Full:
        """Takes three bytes of what it is given, as a disk does that fills up."""

        closed = False
        name = real.name

        def write(self, content: bytes) -> int:
            return real.write(content[:3])

        def fileno(self) -> int:
            return real.fileno()

        def truncate(self, size: int) -> int:
            return real.truncate(size)

    file._file = Full()  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space left"):
        file.add({"step": 2})
    file._file = real
    file.add({"step": 3})
    file.close()
    assert steps_of(path) == [1, 3]


def test_a_line_is_in_the_system_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = jsonl.Lines(path)
    child = os.fork()
    if child == 0:
        file.add({"step": 1})
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    assert steps_of(path) == [1]
    file.close()


def test_the_last_line_is_amended_where_it_is_of_that_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written = jsonl.Lines(path)
    written.amend({"eval_loss": 2.0}, step=1)  # nothing is there: it was lost
    assert path.read_bytes() == b""
    for step in (1, 2):
        written.add({"step": step})
    written.amend({"eval_loss": 2.0}, step=1)
    assert [*jsonl.lines(path)] == [{"step": 1}, {"step": 2}]
    written.amend({"eval_loss": 2.0}, step=2)
    written.amend({"eval_loss": 3.0}, step=2)
    written.add({"step": 3})
    assert [*jsonl.lines(path)] == [{"step": 1}, {"step": 2, "eval_loss": 3.0}, {"step": 3}]
    written.close()
    written.amend({"eval_loss": 4.0}, step=3)
    assert [*jsonl.lines(path)][-1] == {"step": 3}


def test_the_lines_after_a_step_are_those_that_cut_takes_away(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert jsonl.after(path, 3) == b""
    write(path, range(1, 13))
    whole = path.read_bytes()
    for step in (0, 5, 11, 12, 20):
        later = jsonl.after(path, step)
        path.write_bytes(whole)
        jsonl.cut(path, step)
        assert path.read_bytes() + later == whole
        path.write_bytes(whole)
