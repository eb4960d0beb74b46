"""Interleaved rounds of bench commands, and the median of paired ratios with its interval.

    .venv/bin/python bench/run.py --rounds 7 --cells 4096:512:fp32 50257:256:bf16 -- \\
        bench/train_danlu.py bench/train_plain.py bench/train_transformers.py

Each round runs every command once in each cell (vocab:seq:dtype), so that a machine whose speed drifts drifts for all.
The first command is compared with each other one, round by round; the interval is that of the median, by the signs of
the ratios (binomial, at least 90 %). A command may begin with an interpreter of its own: ".../bin/python bench/…".
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import subprocess
import sys
from collections import defaultdict

parser = argparse.ArgumentParser()
parser.add_argument("--rounds", type=int, default=7)
parser.add_argument(
    "--cells", nargs="+", default=["4096:512:fp32", "4096:512:bf16", "50257:256:fp32", "50257:256:bf16"]
)
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--out", help="append each result to this file, a JSON line each")
parser.add_argument("commands", nargs="+", help="scripts, each with its own options in quotes")


def once(command: str, cell: str, steps: int) -> dict:
    """The RESULT line of one command in one cell."""
    vocab, seq, dtype = cell.split(":")
    script = shlex.split(command)
    python = [] if script[0].endswith("python") else [sys.executable]
    words = [*python, *script, "--vocab", vocab, "--seq", seq, "--dtype", dtype]
    done = subprocess.run([*words, "--steps", str(steps)], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(f"{command} gave no result in {cell}:\n{done.stderr[-2000:]}")
    return json.loads(lines[-1][7:])


def interval(ratios: list[float], *, sure: float = 0.9) -> tuple[float, float]:
    """The narrowest pair of order statistics that holds the median with at least this probability."""
    ordered, n = sorted(ratios), len(ratios)
    tail, k = 0.5**n, 0
    while k + 1 < n // 2 and 1 - 2 * (tail + math.comb(n, k + 1) * 0.5**n) >= sure:
        k += 1
        tail += math.comb(n, k) * 0.5**n
    return ordered[k], ordered[n - 1 - k]


def main() -> None:
    chosen = parser.parse_args()
    results: dict[tuple[str, str], list[dict]] = defaultdict(list)
    for number in range(chosen.rounds):
        for cell in chosen.cells:
            for command in chosen.commands:
                result = once(command, cell, chosen.steps)
                results[cell, command].append(result)
                if chosen.out:
                    with open(chosen.out, "a") as file:
                        file.write(json.dumps({"round": number, "command": command, **result}) + "\n")
    first = chosen.commands[0]
    print("| cell | peer | tokens/s | RSS MB | first update s | ratio of tokens/s, paired median [interval] |")
    print("|---|---|---|---|---|---|")
    for cell in chosen.cells:
        for command in chosen.commands:
            rows, ours = results[cell, command], results[cell, first]
            middle = {key: statistics.median(row[key] for row in rows) for key in ("tok_s", "rss_mb", "first_step_s")}
            ratios = [a["tok_s"] / b["tok_s"] for a, b in zip(ours, rows)]
            low, high = interval(ratios)
            ratio = "" if command == first else f"{statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}]"
            print(
                f"| {cell} | {rows[0]['peer']} | {middle['tok_s']:,.0f} | {middle['rss_mb']:,.0f} "
                f"| {middle['first_step_s']:.1f} | {ratio} |"
            )


main()
