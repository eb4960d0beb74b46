"""What recomputing activations costs and gives back: time of an update and memory, against closed expectations.

    python bench/recompute.py [--hidden 384 --layers 6 --vocab 4096 --length 256 --rows 8] [--precision fp32]
        [--kinds selective full '{budget: 0.5}'] [--rounds 7] [--threads 2]

One run of each kind stands in this process beside one that keeps all; they make an update in turn, and the ratio of
each pair counts (its median, with the interval of at least 90 % by the signs of the ratios). Time expected: with a
backward of two forwards, fully recomputing every block makes 4/3; less here, since the head makes its gradients in its
forward and a block's last product is not made again. Selectively no product is made again: 1, and what the cheap parts
cost is what is measured. Memory: the ledger's forecast, and the largest sum of bytes that tensors held in an update.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from pathlib import Path

parser = argparse.ArgumentParser()
for name, size in {"hidden": 384, "layers": 6, "vocab": 4096, "length": 256, "rows": 8}.items():
    parser.add_argument(f"--{name}", type=int, default=size)
parser.add_argument("--precision", default="fp32")
parser.add_argument("--kinds", nargs="+", default=["selective", "full", "{budget: 0.5}"])
parser.add_argument("--rounds", type=int, default=7)
parser.add_argument("--threads", type=int, default=2)
chosen = parser.parse_args()
os.environ["OMP_NUM_THREADS"] = str(chosen.threads)

import torch

from danlu.core.words import size as words
from danlu.core.world import World
from danlu.memory.ledger import forecast
from danlu.memory.tracker import Tracker
from danlu.models.shape import Shape
from danlu.recipe.yaml import load
from danlu.train.assemble import Materials, build, gather
from danlu.train.run import Run
from danlu.train.step import step
from danlu.train.trial import Still, largest

RECIPE = """
name: recompute
folder: {folder}
max_steps: 1000
compile: false
model: {{kind: llama, hidden_size: {hidden}, num_hidden_layers: {layers}, num_attention_heads: {heads},
         num_key_value_heads: {heads}, intermediate_size: {inner}, vocab_size: {vocab},
         max_position_embeddings: {length}, tie_word_embeddings: true}}
data: {{tokenizer: byte, train: [{text}], validation: 0, sequence_length: {length}, packing: false}}
batch: {{global_batch_size: {rows}, micro_batch_size: {rows}}}
memory: {{precision: {precision}, recompute: "{kind}"}}
"""


def start(kind: str, folder: Path) -> tuple[Run, Materials]:
    """A run that recomputes so."""
    text, recipe = folder / "text.txt", folder / "recipe.yaml"
    text.write_text("\n".join("the quick brown fox jumps over the lazy dog " * (1 + n % 9) for n in range(200)))
    heads, inner = max(1, chosen.hidden // 64), chosen.hidden * 8 // 3 // 64 * 64
    sizes = {key: getattr(chosen, key) for key in ("hidden", "layers", "vocab", "length", "rows", "precision")}
    written = RECIPE.format(folder=folder, text=text, heads=heads, inner=inner, kind=kind, **sizes)
    recipe.write_text(written.replace('"{', "{").replace('}"', "}"))
    materials = gather(load(str(recipe)), world=World(), device=torch.device("cpu"), announce=lambda text: None)
    run = build(materials)
    run.source.close()
    run.source = Still(chosen.rows * chosen.length)
    return run, materials


def expected(shape: Shape, kinds: tuple[str, ...]) -> float:
    """Products of an update that recomputes so, against one that keeps all."""
    size, queries, keys = shape.hidden_size, shape.heads * shape.head_dim, shape.key_value_heads * shape.head_dim
    down = size * shape.inner_size
    block = size * (2 * queries + 2 * keys) + 3 * down + 2 * chosen.length * queries
    whole = 3 * (shape.layers * block + size * shape.vocab_size)
    return 1 + sum(block - down for kind in kinds if kind == "full") / whole


def held(run: Run, materials: Materials) -> int:
    """The largest sum of bytes that tensors held in an update."""
    batch = largest(materials)
    with Tracker() as tracker:
        tracker.hold("weights", run.weights.values())
        tracker.hold("moments", run.optim.state().values())
        tracker.hold("batch", [batch.tokens, batch.labels, batch.positions, batch.documents])
        step(run, [batch])
    return tracker.peak


def interval(ratios: list[float], *, sure: float = 0.9) -> tuple[float, float]:
    """The narrowest pair of order statistics that holds the median with at least this probability."""
    ordered, n, k, tail = sorted(ratios), len(ratios), 0, 0.5 ** len(ratios)
    while k + 1 < n // 2 and 1 - 2 * (tail + math.comb(n, k + 1) * 0.5**n) >= sure:
        k += 1
        tail += math.comb(n, k) * 0.5**n
    return ordered[k], ordered[n - 1 - k]


def main() -> None:
    """The table is printed."""
    torch.set_num_threads(chosen.threads)
    names = ["none", *chosen.kinds]
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: start(name, Path(folder)) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(chosen.rounds + 1):
        for name, (run, materials) in runs.items():
            batch, begun = largest(materials), time.perf_counter()
            step(run, [batch])
            if number:  # the first one makes the moments
                seconds[name].append(time.perf_counter() - begun)
    print("| recompute | blocks | s/update | ratio, paired median [interval] | expected | held | forecast | of none |")
    print("|---|---|---|---|---|---|---|---|")
    most = 0
    for name, (run, materials) in runs.items():
        ratios = [ours / none for ours, none in zip(seconds[name], seconds["none"], strict=True)]
        low, high = interval(ratios)
        kinds, peak = materials.case.kinds, held(run, materials)
        most = most or peak
        blocks = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        print(
            f"| {name} | {blocks} | {statistics.median(seconds[name]):.3f} "
            f"| {statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}] "
            f"| {expected(materials.family.shape(), kinds):.3f} | {words(peak)} "
            f"| {words(forecast(materials.case).peak)} | {peak / most:.2f} |"
        )


main()
