"""Attention beside the unfused formula, forward and backward: time, and memory at its peak, by sequence length.

    .venv/bin/python bench/attention.py --lengths 1024 2048 4096 8192 16384 --dtype bf16

Each measurement is a process of its own, so that peaks do not mix. Unfused: softmax(q kᵀ + mask) v with whole scores. A
packed row holds documents of 512 tokens.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

KINDS = ("danlu", "unfused", "danlu, packed", "unfused, packed")
DOCUMENT = 512

parser = argparse.ArgumentParser()
parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
parser.add_argument("--heads", type=int, default=2)
parser.add_argument("--dim", type=int, default=64, help="of a head")
parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--once", choices=KINDS, help="measure this kind here and print one line")
chosen = parser.parse_args()


def once(kind: str, length: int) -> dict[str, float]:
    """Seconds of a forward and backward after a first one, and MB of resident memory that they added at their peak."""
    import torch

    from danlu.models import attention

    torch.set_num_threads(chosen.threads)
    dtype = torch.float32 if chosen.dtype == "fp32" else torch.bfloat16
    q, k, v = (torch.randn(1, length, chosen.heads, chosen.dim, dtype=dtype, requires_grad=True) for _ in range(3))
    packed = kind.endswith("packed")
    documents = torch.arange(length)[None] // (DOCUMENT if packed else length)

    def fused() -> torch.Tensor:
        path = attention.choose(q.device, dtype, length)
        seen = attention.scope(documents, packed=packed, held=0, new=length, path=path)
        return attention.attend(q, k, v, seen)

    def unfused() -> torch.Tensor:
        rows = [part.transpose(1, 2) for part in (q, k, v)]
        allowed = torch.ones(length, length, dtype=torch.bool).tril()
        if packed:
            allowed &= documents[0, :, None] == documents[0, None, :]
        scores = (rows[0] @ rows[1].transpose(-1, -2)) * chosen.dim**-0.5
        return (scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ rows[2]).transpose(1, 2)

    seen = fused if kind.startswith("danlu") else unfused
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    taken = []
    for _ in range(2):
        begun = time.perf_counter()
        seen().sum().backward()
        taken.append(time.perf_counter() - begun)
        q.grad = k.grad = v.grad = None
    return {"seconds": taken[-1], "peak_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024}


def main() -> None:
    if chosen.once:
        print("RESULT " + json.dumps(once(chosen.once, chosen.lengths[0])))
        return
    print(f"| tokens | {' | '.join(KINDS)} | time, peak: unfused / danlu |\n|---|{'---|' * len(KINDS)}---|")
    for length in chosen.lengths:
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
        for _ in range(chosen.rounds):
            for kind in KINDS:
                words = [*sys.argv, "--once", kind, "--lengths", str(length)]
                done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
                found[kind].append(json.loads(done.stdout.rpartition("RESULT ")[2]))
        middle = {
            kind: {name: statistics.median(row[name] for row in rows) for name in ("seconds", "peak_mb")}
            for kind, rows in found.items()
        }
        cells = [f"{row['seconds'] * 1e3:,.0f} ms, {row['peak_mb']:,.0f} MB" for row in middle.values()]
        ours, theirs = middle["danlu"], middle["unfused"]
        ratio = f"{theirs['seconds'] / ours['seconds']:.1f}, {theirs['peak_mb'] / max(ours['peak_mb'], 0.1):.1f}"
        print(f"| {length:,} | {' | '.join(cells)} | {ratio} |", flush=True)


main()
