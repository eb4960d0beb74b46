"""Saving and loading take no more memory than the rank's own share and a fixed buffer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import resource, sys
from pathlib import Path
import torch
from danlu.checkpoint.keep import Checkpoint
from danlu.checkpoint.load import Want, newest, read
from danlu.checkpoint.save import Piece, Saver, Snapshot

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

folder, rows = Path(sys.argv[1]), 15_360
weight = torch.zeros(rows, 1024)  # 60 MB
weight[:, 0] = torch.arange(rows)
small = {"w": Piece.whole(torch.zeros(2, 1024))}
Saver(folder / "warm", Checkpoint(asynchronous=False)).save(Snapshot(step=0, pieces=small, facts={}))
found = newest(folder / "warm")
read(found, {"w": Want((2, 1024), (1, 0), (1, 1024), torch.float32)})
before = peak()
Saver(folder / "at_once", Checkpoint(asynchronous=False)).save(
    Snapshot(step=1, pieces={"w": Piece.whole(weight)}, facts={})
)
print(peak() - before)
before = peak()
got = read(newest(folder / "at_once"), {"w": Want((rows, 1024), (100, 0), (1536, 1024), torch.float32)})["w"]
assert torch.equal(got, weight[100:1636])
print(peak() - before)
before = peak()
saver = Saver(folder / "background", Checkpoint())
for step in (1, 2):
    saver.save(Snapshot(step=step, pieces={"w": Piece.whole(weight)}, facts={}))
saver.finish()
print(peak() - before)
"""


def test_peaks(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    save_at_once, load_a_tenth, save_in_background = map(float, done.stdout.split())
    assert save_at_once < 16  # of 60: no copy, a chunk at a time
    assert load_a_tenth < 6 + 24  # its own tenth, and a buffer
    assert save_in_background < 60 + 24  # one copy, used again by the second save
