"""Processes that encode: in order, bounded, and when one dies it is told which and how."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from danlu.core.errors import Failure, InputError
from danlu.corpus.batches import Batch, Piece
from danlu.corpus.encoders import Encoders
from tests.unit.corpus.encoder import Told


def work(*texts: str) -> Iterator[Batch]:
    for text in texts:
        yield Batch(pieces=[Piece(text, starts=True, ends=True)])


def run(*texts: str, workers: int) -> list[bytes]:
    with Encoders(Told(), workers=workers) as encoders:
        return [bytes(ids[:-1].tolist()) for _, (ids, _) in encoders.map(work(*texts))]


def test_several_processes_give_what_one_gives() -> None:
    texts = ["WAIT first", *(f"text {number}" * 50_000 for number in range(9)), "WAIT last", "SAY something"]
    assert run(*texts, workers=3) == run(*texts, workers=1) == [text.encode() for text in texts]


@pytest.mark.parametrize(
    ("word", "told"),
    [("KILL", "was killed by signal 9, SIGKILL .most likely memory"), ("EXIT", "ended with exit code 3")],
)
def test_a_dead_process_is_named(word: str, told: str) -> None:
    with pytest.raises(Failure, match=rf"tokenising process [12] of 2 \(id \d+\) {told}") as failure:
        run("a", "b", word, *"cdefgh", workers=2)
    assert failure.value.code == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_process_raises_is_raised_here(workers: int) -> None:
    with pytest.raises(InputError, match="told to raise"):
        run("a", "RAISE", "b", workers=workers)


def test_no_more_is_read_than_is_worked_on() -> None:
    taken = 0

    def counted() -> Iterator[Batch]:
        nonlocal taken
        for batch in work(*"abcdefghijkl"):
            taken += 1
            yield batch

    with Encoders(Told(), workers=2) as encoders:
        for given, _ in enumerate(encoders.map(counted()), 1):
            assert taken <= given + 4


def test_leaving_early_leaves_no_process() -> None:
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt), Encoders(Told(), workers=2) as encoders:
        ids = [worker.id for worker in encoders._workers]
        for _ in encoders.map(work(*["WAIT"] * 20)):
            raise KeyboardInterrupt
    for number in ids:
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)
    assert threading.active_count() == before


def test_a_script_without_a_guard_may_use_it(tmp_path: Path) -> None:
    """Where processes are made by spawning, an unguarded main module would run again in each of them."""
    script = tmp_path / "script.py"
    script.write_text(
        "print('main')\n"
        "from danlu.corpus.encoders import Encoders\n"
        "from danlu.corpus.batches import Batch, Piece\n"
        "from danlu.data.tokenizer import load\n"
        "with Encoders(load('byte'), workers=2) as encoders:\n"
        "    for _, (ids, ends) in encoders.map(iter([Batch(pieces=[Piece('ab', True, True)])] * 3)):\n"
        "        print(ids.tolist())\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "main\n" + "[97, 98, 256]\n" * 3, done.stderr
