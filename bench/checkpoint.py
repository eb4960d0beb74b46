"""Saving and loading 97.5 M parameters with AdamW's two moments in fp32 (1.17 GB), against plain safetensors.

    python bench/checkpoint.py [--parameters 97.5e6] [--folder FOLDER] [--rounds 5] [--threads 2]

Printed, as medians over the rounds (in each, every way has its turn): how long training stands still for a save, how
long until it is durable, and how long a checked load takes; beside them one `save_file`, the same with the sync that
makes it durable, and a plain read of the same bytes. What was just written is in the page cache: loading times the
reader and the hashing, not the disk.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--parameters", type=float, default=97.5e6)
parser.add_argument("--folder", type=Path)
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--threads", type=int, default=2)
chosen = parser.parse_args()
os.environ["OMP_NUM_THREADS"] = str(chosen.threads)

import torch
from safetensors.torch import save_file

from danlu.checkpoint.keep import Checkpoint
from danlu.checkpoint.load import Found, Want, newest, read
from danlu.checkpoint.save import NotSaved, Piece, Saver, Snapshot


def state(parameters: int, width: int = 768, layers: int = 12) -> dict[str, torch.Tensor]:
    """So many parameters and their moments, in about as many tensors as a model of that size has."""
    each = parameters // (layers * 9)
    shape = (max(1, each // width), width)
    names = [f"blocks.{layer}.{part}" for layer in range(layers) for part in range(9)]
    return {f"{kind}/{name}": torch.randn(shape) for kind in ("weights", "exp_avg", "exp_avg_sq") for name in names}


def seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def durable(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def plain_read(path: Path, size: int) -> torch.Tensor:
    """All bytes of the file in memory that was not touched before, as a load's is."""
    whole = torch.empty(size, dtype=torch.uint8)
    view, at = memoryview(whole.numpy()), 0
    with open(path, "rb", buffering=0) as file:
        while got := file.readinto(view[at : at + (16 << 20)]):
            at += got
    return whole


def main() -> None:
    """All figures, one line each."""
    tensors = state(int(chosen.parameters))
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    wanted = {name: Want.whole(tensor) for name, tensor in tensors.items()}
    times: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        times.setdefault(name, []).append(value)

    with tempfile.TemporaryDirectory(dir=chosen.folder) as place:
        root = Path(place)
        savers = {
            kind: Saver(root / kind, Checkpoint(keep_last=2, keep_best=0, asynchronous=kind == "background"))
            for kind in ("background", "at once")
        }
        for step in range(chosen.rounds + 1):
            found: Found | None = None
            for kind, saver in savers.items():
                pieces = {name: Piece.whole(tensor) for name, tensor in tensors.items()}
                begun = time.perf_counter()
                done = saver.save(Snapshot(step=step, pieces=pieces, facts={}))
                stall = time.perf_counter() - begun
                [outcome] = done + saver.finish()
                assert not isinstance(outcome, NotSaved), outcome
                if step:  # the first round makes the memory that later ones use again
                    note(f"save {kind}: training stands still", stall)
                    note(f"save {kind}: until durable", time.perf_counter() - begun)
                elif kind == "background":
                    print(f"first save in the background: training stands still {stall:.2f} s")
            plain = root / "plain.safetensors"
            taken = seconds(lambda: save_file(tensors, plain))  # noqa: B023
            note("save_file of the same", taken)
            plain.unlink()
            note("save_file and sync", seconds(lambda: durable(plain, tensors)))  # noqa: B023

            def load(deep: bool) -> None:
                nonlocal found
                found = newest(root / "at once", deep=deep)
                assert found is not None
                read(found, wanted)

            note("load, each tensor checked as it is read", seconds(lambda: load(False)))
            note("load, every byte checked before, and again", seconds(lambda: load(True)))
            note("plain read of the same bytes", seconds(lambda: plain_read(plain, size)))  # noqa: B023
            assert found is not None
            plain.unlink()
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
    print(f"{size / 1e9:.2f} GB in {len(tensors)} tensors, {chosen.threads} threads, {chosen.rounds} rounds")
    for name, values in times.items():
        print(f"{statistics.median(values):6.2f} s  ({min(values):.2f} to {max(values):.2f})  {name}")


if __name__ == "__main__":
    main()
