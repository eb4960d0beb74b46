"""What every train_*.py of this folder shares: one set of options, one meter, one result line.

Each trains the same decoder on the same random tokens and prints one line, `RESULT {json}`. By hand:

    .venv/bin/python bench/train_danlu.py --vocab 4096 --seq 512 --dtype bf16 --steps 8
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from typing import Any


def options(**extra: dict[str, Any]) -> argparse.Namespace:
    """The options, read; threads are set before torch is imported."""
    parser = argparse.ArgumentParser()
    sizes = {"dim": 384, "layers": 6, "heads": 6, "ffn": 1024, "vocab": 4096, "seq": 256, "mb": 8}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--steps", type=int, default=8, help="timed steps")
    parser.add_argument("--warm", type=int, default=2, help="steps before the timed ones")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile", action="store_true")
    for name, facts in extra.items():
        parser.add_argument(f"--{name}", **facts)
    chosen = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(chosen.threads)
    return chosen


def tokens(chosen: argparse.Namespace, rows: int) -> Any:
    """Random ids [rows, seq + 1], the same for every script."""
    import torch

    return torch.randint(chosen.vocab, (rows, chosen.seq + 1), generator=torch.Generator().manual_seed(0))


def seconds_since_start() -> float:
    """Seconds since this process started, by the kernel's own record."""
    with open("/proc/self/stat") as file:
        started = int(file.read().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


class Meter:
    """`tick` once when each update has ended; `report` at the end."""

    def __init__(self, peer: str, chosen: argparse.Namespace) -> None:
        self.peer, self.chosen = peer, chosen
        self.times: list[float] = []
        self.losses: list[float] = []
        self.first: float | None = None

    def tick(self, loss: float | None = None) -> None:
        """One update has ended."""
        if self.first is None:
            self.first = seconds_since_start()
        self.times.append(time.perf_counter())
        if loss is not None:
            self.losses.append(loss)

    def report(self, **more: Any) -> None:
        """The result line is printed."""
        a, warm = self.chosen, self.chosen.warm
        spans = [later - earlier for earlier, later in zip(self.times[warm - 1 :], self.times[warm:])]
        step = statistics.median(spans)
        products = a.layers * (4 * a.dim**2 + 3 * a.dim * a.ffn) + a.vocab * a.dim
        per_token = 6 * products + 12 * a.layers * a.seq * a.dim
        print(
            "RESULT "
            + json.dumps(
                {
                    "peer": self.peer,
                    "vocab": a.vocab,
                    "seq": a.seq,
                    "mb": a.mb,
                    "dtype": a.dtype,
                    "n": len(spans),
                    "tok_s": round(a.mb * a.seq / step, 1),
                    "step_s": round(step, 4),
                    "min_step_s": round(min(spans), 4),
                    "first_step_s": round(self.first or 0.0, 2),
                    "rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
                    "gflops": round(per_token * a.mb * a.seq / step / 1e9, 1),
                    "loss": [round(x, 3) for x in (self.losses[:1] + self.losses[-1:])],
                    **more,
                }
            ),
            flush=True,
        )
