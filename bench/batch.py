"""What a larger batch is worth: held-out loss at equal tokens, beside the gradient noise scale that foretells it.

    .venv/bin/python bench/batch.py [--tokens 1.2M] [--factors 1,4,16] [--kinds adamw,lamb] [--seeds 1] [key=value …]

Each run is the shipped recipe `shakespeare` with a smaller model, by `danlu.train`, and reads the same tokens in the
same order; only the rows of an update and the optimiser differ. Rates go with the root of the batch (LAMB's own rule,
and Malladi et al. 2022, arXiv:2205.10287, for Adam), warm-up takes a tenth of the updates. The noise scale is what each
run's last measurement says, a moving mean over about ten of fifty.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROWS, LENGTH = 8, 128  # of an update of factor 1; tokens of a row
RATES = {"adamw": 2e-3, "lamb": 1e-2}  # of factor 1
SMALL = [
    "model.hidden_size=128",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=2",
    "model.num_key_value_heads=2",
    "model.intermediate_size=352",
    f"data.sequence_length={LENGTH}",
    "evaluate={eval_steps: 1000000, prompts: []}",
    "checkpoint={save_steps: 1000000, keep_best: 0}",
]


@dataclass(frozen=True)
class Made:
    """What one run came to."""

    kind: str
    factor: int
    seed: int
    updates: int
    loss: float
    noise: float | None
    seconds: float
    said: str


def run(folder: Path, kind: str, factor: int, seed: int, tokens: int, more: list[str]) -> Made:
    """One run, from nothing to its end."""
    import danlu
    from danlu.recipe.yaml import load

    rows = ROWS * factor
    updates = math.ceil(tokens / (rows * LENGTH))
    rate = RATES.get(kind, RATES["adamw"]) * math.sqrt(factor)
    typed = [
        *SMALL,
        f"name={kind}-{factor}-{seed}",
        f"folder={folder}",
        f"seed={seed}",
        f"max_steps={updates}",
        f"batch.global_batch_size={rows}",
        f"batch.micro_batch_size={ROWS // 2}",
        f"optimizer.kind={kind}",
        f"optimizer.learning_rate={rate:g}",
        f"optimizer.schedule.warmup_steps={max(1, updates // 10)}",
        f"monitor={{noise_steps: {max(1, updates // 50)}, console: false, tensorboard: false, curve: false}}",
        *more,
    ]
    begun = time.monotonic()
    place = Path(danlu.train(load("shakespeare", typed)).root)
    seconds = time.monotonic() - begun
    metrics, events = (list(lines(place / name)) for name in ("metrics.jsonl", "events.jsonl"))
    noise = [line["noise_scale"] for line in metrics if "noise_scale" in line]
    said = [event["cause"] for event in events if event["event"] == "noise"]
    loss = next(line["eval_loss"] for line in reversed(metrics) if "eval_loss" in line)
    return Made(kind, factor, seed, updates, loss, noise[-1] if noise else None, seconds, said[-1] if said else "")


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Each line of a file of JSON lines."""
    yield from (json.loads(line) for line in path.read_text().splitlines())


def table(made: list[Made]) -> Iterator[str]:
    """A line a batch and optimiser: losses are means over seeds."""
    yield "| optimiser | rows | tokens | updates | held-out loss | noise scale, tokens | noise / batch | seconds |"
    yield "|---|---|---|---|---|---|---|---|"
    for kind, factor in dict.fromkeys((one.kind, one.factor) for one in made):
        same = [one for one in made if (one.kind, one.factor) == (kind, factor)]
        batch = ROWS * factor * LENGTH
        noises = [one.noise for one in same if one.noise is not None]
        noise = sum(noises) / len(noises) if noises else None
        loss = sum(one.loss for one in same) / len(same)
        told = ("–", "–") if noise is None else (f"{noise:,.0f}", f"{noise / batch:.2g}")
        yield (
            f"| {kind} | {ROWS * factor} | {batch:,} | {same[0].updates} | {loss:.3f} | {told[0]} | {told[1]} | "
            f"{sum(one.seconds for one in same) / len(same):.0f} |"
        )


def main() -> None:
    """The runs, one after the other, and the table."""
    from danlu.core.fields import number

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=lambda text: number(text, whole=True, suffixes=True), default=1_200_000)
    parser.add_argument("--factors", type=lambda text: [int(one) for one in text.split(",")], default=[1, 4, 16])
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=["adamw", "lamb"])
    parser.add_argument("--seeds", type=int, default=1)
    chosen, more = parser.parse_known_args()
    made = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in chosen.kinds:
            for factor in chosen.factors:
                for seed in range(1, chosen.seeds + 1):
                    made.append(run(Path(folder), kind, factor, seed, chosen.tokens, more))
                    print(f"RESULT {json.dumps(made[-1].__dict__)}", flush=True)
    print("\n".join(table(made)))
    for one in made:
        if one.said:
            print(f"\n{one.kind}, {ROWS * one.factor} rows: {one.said}")


if __name__ == "__main__":
    main()
