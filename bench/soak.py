"""Faults of every kind in one long run: how many updates they cost, and whether anything went wrong without a word.

    python bench/soak.py [--ranks 1 2] [--faults 50] [--seed 1] [--folder FOLDER]

One line for each number of ranks: faults, lost updates (missing or different at the end; repeated ones are not lost),
silent errors, goodput (updates of the run over updates that were computed), and the time beside that of the same run
left alone, which one start of the process is a part of.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.fault.soak import soak

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    chosen = parser.parse_args()
    for ranks in chosen.ranks:
        with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
            outcome = soak(Path(folder), ranks=ranks, faults=chosen.faults, seed=chosen.seed)
            print(outcome, *outcome.silent, sep="\n  ", flush=True)
