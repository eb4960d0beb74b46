"""What it costs to keep optimizer states in a file, and what it gives back: time of an update, and memory.

    python bench/offload.py [--hidden 640 --layers 10 --vocab 50257 --length 512 --rows 8 --micro 4] [--folder FOLDER]
        [--optimizer adamw] [--rounds 7] [--threads 2] [--cold]

Two runs of one recipe stand in one process, one with its states in memory and one with them in a file; they make an
update in turn, and the ratio of each pair counts. Then each stands in a process of its own, which is asked how large it
was at its largest, and what its states take, update by update. --cold: the system is asked to drop the file from its
page cache before each update, as it would if memory were short; the reads then come from the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--hidden", type=int, default=640)
parser.add_argument("--layers", type=int, default=10)
parser.add_argument("--vocab", type=int, default=50257)
parser.add_argument("--length", type=int, default=512)
parser.add_argument("--rows", type=int, default=8)
parser.add_argument("--micro", type=int, default=4)
parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "danlu-bench-offload")
parser.add_argument("--optimizer", default="adamw")
parser.add_argument("--rounds", type=int, default=7)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--cold", action="store_true")
parser.add_argument("--alone", choices=["memory", "file"], help="for the bench itself: one run, its memory as JSON")
chosen = parser.parse_args()
os.environ["OMP_NUM_THREADS"] = str(chosen.threads)

import torch

from danlu.core.world import World
from danlu.memory.states import StatesAway
from danlu.recipe.yaml import load
from danlu.train.assemble import build, gather
from danlu.train.run import Run
from danlu.train.step import step

RECIPE = """
name: offload
folder: {folder}
max_steps: 1000
model: {{kind: llama, hidden_size: {hidden}, num_hidden_layers: {layers}, num_attention_heads: {heads},
         num_key_value_heads: {heads}, intermediate_size: {inner}, vocab_size: {vocab},
         max_position_embeddings: {length}, tie_word_embeddings: true}}
data: {{tokenizer: byte, train: [{text}], validation: 0, sequence_length: {length}}}
batch: {{global_batch_size: {rows}, micro_batch_size: {micro}}}
optimizer: {{kind: {optimizer}}}
memory: {{precision: fp32}}
"""


def start(place: str) -> tuple[Run, int]:
    """A run with its states there, and the micro-batches of its updates."""
    chosen.folder.mkdir(parents=True, exist_ok=True)
    text, recipe = chosen.folder / "text.txt", chosen.folder / "recipe.yaml"
    if not text.exists():
        text.write_text("\n".join("the quick brown fox jumps over the lazy dog " * (1 + n % 9) for n in range(20000)))
    sizes = {key: getattr(chosen, key) for key in ("hidden", "layers", "vocab", "length", "rows", "micro", "optimizer")}
    heads, inner = max(1, chosen.hidden // 64), chosen.hidden * 8 // 3 // 64 * 64
    recipe.write_text(RECIPE.format(folder=chosen.folder / "runs", text=text, heads=heads, inner=inner, **sizes))
    file = ["memory.offload=[optimizer]", f"memory.offload_folder={chosen.folder / 'states'}"]
    settings = load(str(recipe), file if place == "file" else [])
    materials = gather(settings, world=World(), device=torch.device("cpu"), announce=lambda text: None)
    return build(materials), materials.micros


def update(run: Run, micros: int) -> float:
    """Seconds of one update, with its data; the last of its writes is still under way, as in a run."""
    states = run.optim.states
    if chosen.cold and isinstance(states, StatesAway):
        states.settle()
        handle = states.place._handle  # type: ignore[attr-defined]
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    begun = time.perf_counter()
    step(run, run.source.take(micros))
    return time.perf_counter() - begun


def status(name: str) -> float:
    """Megabytes, of /proc/self/status."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name)) * 1024 / 1e6


def alone() -> None:
    run, micros = start(chosen.alone)
    between = []
    for number in range(4):
        if number == 1:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # the highest mark is now: the first update makes the states
        update(run, micros)
        between.append(status("VmRSS"))
    tensors = sum(
        value.numel() * value.element_size() for kept in run.optim.torch.state.values() for value in kept.values()
    )
    parameters = sum(weight.numel() for weight in run.weights.values())
    figures = {"peak_mb": status("VmHWM"), "between_mb": min(between[1:]), "states_mb": tensors / 1e6}
    print(json.dumps(figures | {"parameters": parameters}))


def main() -> None:
    if chosen.alone:
        alone()
        return
    sizes = {}
    for place in ("memory", "file"):
        command = [sys.executable, __file__, *sys.argv[1:], "--alone", place]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        sizes[place] = json.loads(done.stdout.splitlines()[-1])
    runs = {place: start(place) for place in ("memory", "file")}
    spans: dict[str, list[float]] = {place: [] for place in runs}
    for number in range(chosen.rounds + 1):
        for place in sorted(runs, reverse=bool(number % 2)):
            spent = update(*runs[place])
            if number:  # the first update makes the states
                spans[place].append(spent)
    weights = [runs[place][0].weights for place in runs]
    assert all(torch.equal(one, other) for one, other in zip(*(w.values() for w in weights))), "the runs differ"
    ratios = [file / memory for file, memory in zip(spans["file"], spans["memory"])]
    print(f"{sizes['file']['parameters'] / 1e6:.1f} M parameters, {chosen.rows} x {chosen.length} tokens an update")
    for place in runs:
        figures = sizes[place]
        print(
            f"states in {place:6}: {statistics.median(spans[place]):7.3f} s an update; resident "
            f"{figures['peak_mb']:.0f} MB at most, {figures['between_mb']:.0f} MB between updates; "
            f"states in tensors {figures['states_mb']:.0f} MB"
        )
    gone = sizes["memory"]["between_mb"] - sizes["file"]["between_mb"]
    print(
        f"time: {statistics.median(ratios):.3f} x ({min(ratios):.3f} to {max(ratios):.3f}); "
        f"gone between updates: {gone:.0f} MB"
    )


if __name__ == "__main__":
    main()
