"""A shard of a billion tokens: how long it takes to open, what it costs in memory, how fast rows are read and sought.

    python bench/data_store.py [--tokens 1000000000] [--folder FOLDER]

Writes 2 bytes a token below the folder (the system's temporary one) and removes them at the end. What was just written
is in the page cache, so this times the reader and not the disk.
"""

from __future__ import annotations

import argparse
import json
import statistics
import struct
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from danlu.data.pack import Cut, Row, stack
from danlu.data.source import Rows, Set
from danlu.data.split import split
from danlu.data.store import Shards

LENGTH = 2048  # tokens of a row
BLOCK = 1 << 24  # tokens written at once
READS = 20_000


def make(prefix: Path, tokens: int) -> None:
    """A shard of random ids below 50,000, in documents of 100 to 1,900 tokens."""
    draw = np.random.default_rng(1)
    block = draw.integers(0, 50_000, BLOCK, dtype=np.uint16)
    with open(f"{prefix}.bin", "wb") as file:
        for start in range(0, tokens, BLOCK):
            block[: len(block) // 1000] += 1  # no two blocks are the same
            block %= 50_000
            file.write(block[: tokens - start].tobytes())
    ends = np.cumsum(draw.integers(100, 1900, tokens // 900))
    ends = np.append(ends[ends < tokens], tokens)
    lengths = np.diff(ends, prepend=0)
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(ends), len(ends) + 1))
        file.write(lengths.astype("<i4").tobytes() + ((ends - lengths) * 2).astype("<i8").tobytes())
        file.write(np.arange(len(ends) + 1, dtype="<i8").tobytes())


def resident() -> float:
    """Memory of this process, MB."""
    return psutil.Process().memory_info().rss / 1e6


def reads(store: Shards, seed: int) -> tuple[float, float]:
    """MB/s of ids on disk, rows at random places: by the clock, and by this process's own time on a busy machine."""
    places = np.random.default_rng(seed).integers(0, store.tokens // LENGTH - 1, READS) * LENGTH
    begun, used = time.perf_counter(), time.process_time()
    for place in places.tolist():
        store.read(place, LENGTH + 1)
    size = READS * LENGTH * 2 / 1e6
    return size / (time.perf_counter() - begun), size / (time.process_time() - used)


def measure(prefix: Path) -> dict[str, float]:
    """Every figure, by name."""
    figures = {}
    warm = Shards([prefix])
    warm.close()
    before = resident()
    opened = []
    for _ in range(5):
        begun = time.perf_counter()
        store = Shards([prefix], vocab_size=50_000)
        opened.append(time.perf_counter() - begun)
    figures["open_seconds"] = statistics.median(opened)
    figures["open_memory_mb"] = resident() - before
    rates = [reads(store, seed) for seed in range(5)]
    figures["read_mb_per_second"] = statistics.median(clock for clock, _ in rates)
    figures["read_mb_per_process_second"] = statistics.median(used for _, used in rates)
    figures["read_memory_mb"] = resident() - before

    cut = Cut(store, length=LENGTH, packing=True)
    places = np.random.default_rng(9).integers(0, cut.rows, 4096).tolist()
    begun = time.perf_counter()
    for start in range(0, 4096, 32):
        stack([Row(cut, row, "") for row in places[start : start + 32]], length=LENGTH, pad_id=0)
    figures["batch_tokens_per_second"] = 4096 * LENGTH / (time.perf_counter() - begun)

    rows = Rows(
        [Set(name="a", stream=store)], sequence_length=LENGTH, global_batch_size=32, seed=1, pad_id=0, workers=0
    )
    begun = time.perf_counter()
    rows.seek({"samples": 10**9})
    rows.take(1)
    figures["seek_and_first_batch_seconds"] = time.perf_counter() - begun
    begun = time.perf_counter()
    for _ in range(100):
        rows.take(1)
    figures["batch_seconds"] = (time.perf_counter() - begun) / 100

    begun = time.perf_counter()
    split(store, 0.01)
    figures["split_seconds"] = time.perf_counter() - begun
    figures["all_memory_mb"] = resident() - before
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=1_000_000_000)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        make(Path(folder) / "shard", options.tokens)
        found = measure(Path(folder) / "shard")
    print("RESULT", json.dumps({"tokens": options.tokens, **{name: round(value, 5) for name, value in found.items()}}))
