"""The demo's own figures: seconds to the first update, tokens a second, and what the loop costs beside the step.

    .venv/bin/python bench/demo.py [key=value …]

The first update is timed from the start of the process that a user starts. The loop's own cost is everything between
two updates that is not forward, backward or update: data, counting, logging, hooks; evaluations and saves are left out.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

STEPS = 60


def first_update(overrides: list[str]) -> float:
    """Seconds from the start of `danlu train shakespeare` to the first line of metrics.jsonl."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.monotonic()
        words = [sys.executable, "-m", "danlu", "train", "shakespeare", f"folder={folder}", "max_steps=5", *overrides]
        words += ["optimizer.schedule.warmup_steps=1", "evaluate.prompts=[]"]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        metrics = Path(folder) / "shakespeare" / "metrics.jsonl"
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.01)
        seconds = time.monotonic() - begun
        process.wait()
        return seconds


def overhead(overrides: list[str]) -> dict[str, float]:
    """Shares of the time between updates, over STEPS updates in this process."""
    from danlu.compute.layer import ComputeLayer
    from danlu.optim.layer import OptimLayer
    from danlu.recipe.yaml import load
    from danlu.train.loop import train

    spent = {"forward, backward": 0.0, "norm": 0.0, "update": 0.0}

    def timed(name: str, function):
        def call(*arguments, **named):
            begun = time.perf_counter()
            try:
                result = function(*arguments, **named)
                return list(result) if isinstance(result, Iterator) else result
            finally:
                spent[name] += time.perf_counter() - begun

        return call

    ComputeLayer.forward_backward = timed("forward, backward", ComputeLayer.forward_backward)
    ComputeLayer.norm = timed("norm", ComputeLayer.norm)
    OptimLayer.clip = timed("update", OptimLayer.clip)
    OptimLayer.step = timed("update", OptimLayer.step)
    OptimLayer.zero = timed("update", OptimLayer.zero)
    with tempfile.TemporaryDirectory() as folder:
        quiet = ["evaluate.eval_steps=1000", "checkpoint.save_steps=1000", "evaluate.prompts=[]"]
        run = train(load("shakespeare", [f"folder={folder}", f"max_steps={STEPS}", *quiet, *overrides]))
        lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
        events = [json.loads(line) for line in run.events.read_text().splitlines()]
    del events
    laps = sum(line["step_seconds"] + line["data_seconds"] for line in lines)
    return {"seconds": laps, **{name: seconds / laps for name, seconds in spent.items()}}


def main() -> None:
    overrides = sys.argv[1:]
    seconds = sorted(first_update(overrides) for _ in range(3))
    shares = overhead(overrides)
    rest = 1 - sum(value for name, value in shares.items() if name != "seconds")
    print(f"first update: {seconds[1]:.1f} s after the start (of three: {', '.join(f'{s:.1f}' for s in seconds)})")
    print(f"{STEPS} updates in {shares.pop('seconds'):.1f} s: " + ", ".join(f"{n} {v:.1%}" for n, v in shares.items()))
    print(f"the loop's own: {rest:.2%}")


main()
