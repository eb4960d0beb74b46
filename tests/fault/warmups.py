"""Real runs of a tiny model through their warm-up, recorded: the courses on which nothing may raise an alarm.

``python -m tests.fault.warmups`` writes warmups.json anew: for each of ten seeds the loss, the gradient norm and the
rate of each update of a small llama on the shipped text, gently and briskly warmed up. It takes some minutes.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("warmups.json")
SEEDS = range(1, 11)
STEPS = 240
KINDS = {
    "gentle": {"rate": 3e-3, "warmup": 60, "rows": 8},
    "brisk": {"rate": 1e-2, "warmup": 10, "rows": 4},
}
RECIPE = """
name: warmup
seed: {seed}
folder: {folder}
max_steps: 1000
model: {{kind: llama, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
         intermediate_size: 64, max_position_embeddings: 64, tie_word_embeddings: true}}
data: {{tokenizer: byte, train: ["shipped:text/shakespeare.txt"], sequence_length: 64, workers: 0}}
batch: {{global_batch_size: {rows}, micro_batch_size: {rows}}}
optimizer: {{learning_rate: {rate}, schedule: {{kind: cosine, warmup_steps: {warmup}}}}}
memory: {{precision: fp32}}
"""


class Update(NamedTuple):
    """One recorded update."""

    loss: float
    norm: float
    rate: float


def recorded() -> dict[str, list[Update]]:
    """Each course by its kind and seed."""
    found = json.loads(FILE.read_text())
    return {name: [Update(*update) for update in course] for name, course in found.items()}


def record(seed: int, **facts: float) -> list[Update]:
    """The course of a real run."""
    import torch

    from danlu.core.world import World
    from danlu.recipe.yaml import load
    from danlu.train.assemble import build, gather
    from danlu.train.step import step

    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(RECIPE.format(seed=seed, folder=folder, **facts))
        materials = gather(load(str(recipe)), world=World(), device=torch.device("cpu"), announce=lambda text: None)
        run = build(materials)
        reports = [step(run, run.source.take(materials.micros)) for _ in range(STEPS)]
        run.source.close()
    return [Update(each.loss, each.norm.item(), each.learning_rate) for each in reports]


def main() -> None:
    """The file is written anew."""
    courses = {
        f"{kind} {seed}": [[float(f"{number:.5g}") for number in update] for update in record(seed, **facts)]
        for kind, facts in KINDS.items()
        for seed in SEEDS
    }
    FILE.write_text("{\n" + ",\n".join(f'"{name}": {json.dumps(c)}' for name, c in courses.items()) + "\n}\n")


if __name__ == "__main__":
    main()
