"""Saves again and again in forked children, each killed without warning: run as a program, prints one line of JSON.

One parent imports torch once; a child is a run that takes up its folder where the last one left it. ``python -m
tests.fault.killed FOLDER SEED TRIALS WORLD``.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from danlu.checkpoint.keep import Checkpoint
from danlu.checkpoint.load import newest
from danlu.checkpoint.save import Saved, Saver
from tests.unit.checkpoint.made import holds, snapshot

ROWS = 40_000  # about 1.4 MB a checkpoint


def run(folder: Path, attempt: str, first: int, rank: int, world: int, told: int, asynchronous: bool) -> None:
    """A run that saves every step for ever and says on ``told`` which steps are safe."""
    settings = Checkpoint(keep_last=1, keep_best=0, asynchronous=asynchronous)
    saver = Saver(folder, settings, rank=rank, world=world, attempt=attempt, wait_seconds=5)
    for step in range(first, first + 10_000):
        for outcome in saver.save(snapshot(step, rank, world, rows=ROWS)):
            assert isinstance(outcome, Saved), outcome
            if rank == 0:
                os.write(told, outcome.step.to_bytes(4, "little"))


def trial(folder: Path, draw: random.Random, number: int, first: int, world: int, longest: float) -> int:
    """One run killed at a random moment; the last step that it was told is safe, 0 if none."""
    listen, told = os.pipe()
    asynchronous = draw.random() < 0.5
    children = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            try:
                run(folder, f"a{number}", first, rank, world, told, asynchronous)
            finally:
                os._exit(3)
        children.append(pid)
    os.close(told)
    time.sleep(draw.uniform(0, longest))
    draw.shuffle(children)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        time.sleep(draw.choice([0.0, 0.003]))
    for pid in children:
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), f"a run ended by itself: {status}"
    content = b""
    while got := os.read(listen, 1 << 16):
        content += got
    os.close(listen)
    return int.from_bytes(content[-4:], "little") if content else 0


def main() -> None:
    """All trials; what came of them."""
    folder, seed, trials, world = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    draw = random.Random(seed)
    # Kills fall within the first four saves, however fast or busy this machine is.
    begun = time.monotonic()
    for step in (1, 2):
        Saver(folder, Checkpoint(asynchronous=False)).save(snapshot(step, rows=ROWS))
    longest = 2 * (time.monotonic() - begun) + 0.02
    safe, cut_off, skipped, committed = 2, 0, 0, 0
    for number in range(trials):
        safe = max(safe, trial(folder, draw, number, safe + 1, world, longest))
        cut_off += any(p.name.startswith(("tmp-", "old-", "del-")) for p in folder.iterdir())
        found = newest(folder)
        assert found is not None and found.step >= safe, (number, found, safe)
        holds(found, ROWS)
        skipped += len(found.skipped)
        safe = committed = found.step
    print(json.dumps({"trials": trials, "last": committed, "cut_off": cut_off, "skipped": skipped}))


if __name__ == "__main__":
    main()
