"""Saving and loading 97.5 M parameters with AdamW's two moments in fp32 (1.17 GB), against plain safetensors.

    python bench/checkpoint.py [--parameters 97.5e6] [--folder FOLDER] [--rounds 5] [--threads 2]

Printed, as medians over the rounds (in each, every way has its turn): how long training stands still for a save, how
long until it is durable, and how long a checked load takes; beside them one `save_file`, the same with the sync that
makes it durable, and a plain read of the same bytes. Reads are timed twice: out of the page cache (the reader and the
hashing), and after the system was asked to drop the file from it (the disk). Then the ratios that count, pair by pair,
and the memory that each way takes at most, above the tensors themselves.
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


def resident() -> float:
    """Megabytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def at_most(work: Callable[[], object]) -> float:
    """Megabytes more than before that the process had in memory at its largest meanwhile."""
    before = resident()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the highest mark is now
    work()
    with open("/proc/self/status") as file:
        mark = next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
    return mark * 1024 / 1e6 - before


def forget(folder: Path) -> None:
    """The files are in no cache; what was not yet on the disk is now."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


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


def save_once(saver: Saver, pieces: dict[str, Piece]) -> None:
    saver.save(Snapshot(step=999, pieces=pieces, facts={}))
    saver.finish()


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
            kind: Saver(root / kind, Checkpoint(keep_last=1, keep_best=0, asynchronous=kind == "background"))
            for kind in ("background", "at once")
        }
        pieces = {name: Piece.whole(tensor) for name, tensor in tensors.items()}
        reserved = Saver(root / "reserved", Checkpoint(keep_last=1, keep_best=0))
        reserved.reserve(Snapshot(step=0, pieces=pieces, facts={}))
        time.sleep(2 * size / 1e9 + 0.5)  # training goes on meanwhile
        begun = time.perf_counter()
        reserved.save(Snapshot(step=0, pieces=pieces, facts={}))
        stall = time.perf_counter() - begun
        print(f"first save in the background, room made ready before: training stands still {stall:.2f} s")
        reserved.finish()
        del reserved
        shutil.rmtree(root / "reserved")
        for step in range(chosen.rounds + 1):
            found: Found | None = None
            for kind, saver in savers.items():
                os.sync()  # what was written before is not waited for below
                begun = time.perf_counter()
                done = saver.save(Snapshot(step=step, pieces=pieces, facts={}))
                stall = time.perf_counter() - begun
                [outcome] = done + saver.finish()
                assert not isinstance(outcome, NotSaved), outcome
                note(f"save {kind}: training stands still", stall)
                note(f"save {kind}: until durable", time.perf_counter() - begun)
                if not step and kind == "background":
                    print(f"first save in the background, in fresh memory: training stands still {stall:.2f} s")
            plain = root / "plain.safetensors"
            os.sync()
            note("save_file of the same", seconds(lambda: save_file(tensors, plain)))  # noqa: B023
            plain.unlink()
            os.sync()
            note("save_file and sync", seconds(lambda: durable(plain, tensors)))  # noqa: B023

            def load(deep: bool) -> None:
                nonlocal found
                found = newest(root / "at once", deep=deep)
                assert found is not None
                read(found, wanted)

            for cache in ("cached", "cold"):
                for name, work in (
                    (f"load {cache}, each tensor checked as it is read", lambda: load(False)),
                    (f"load {cache}, as a run does: every byte checked before, and again", lambda: load(True)),
                    (f"plain read {cache} of the same bytes", lambda: plain_read(plain, size)),  # noqa: B023
                ):
                    if cache == "cold":
                        forget(root)
                    note(name, seconds(work))
            assert found is not None
            plain.unlink()
            if not step:
                times.clear()  # the first round makes the memory that later ones use again
        work_of = {
            f"save background, besides its room of {size / 1e6:.0f} MB": lambda: save_once(
                savers["background"], pieces
            ),
            "save at once": lambda: save_once(savers["at once"], pieces),
            f"load of tensors of {size / 1e6:.0f} MB": lambda: load(True),
        }
        memory = {name: at_most(work) for name, work in work_of.items()}
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
    print(f"{size / 1e9:.2f} GB in {len(tensors)} tensors, {chosen.threads} threads, {chosen.rounds} rounds")
    for name, values in times.items():
        print(f"{statistics.median(values):6.2f} s  ({min(values):.2f} to {max(values):.2f})  {name}")
    for name, over in (
        ("save background: training stands still", "save_file of the same"),
        ("load cached, as a run does: every byte checked before, and again", "plain read cached of the same bytes"),
        ("load cold, as a run does: every byte checked before, and again", "plain read cold of the same bytes"),
    ):
        ratios = [one / other for one, other in zip(times[name], times[over], strict=True)]
        print(f"{statistics.median(ratios):6.2f} x  ({min(ratios):.2f} to {max(ratios):.2f})  {name} / {over}")
    for name, value in memory.items():
        print(f"{value:6.0f} MB more in memory at most: {name}")


if __name__ == "__main__":
    main()
