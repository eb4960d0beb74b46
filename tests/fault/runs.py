"""Whole runs in processes of their own, forked from one that has imported everything: half a second instead of four."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

RECIPE = """
name: fault
folder: {folder}
max_steps: {steps}
model: {{kind: llama, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
         intermediate_size: 64, max_position_embeddings: 64}}
data: {{tokenizer: byte, train: [{text}], validation: 0.1, sequence_length: 32, split: line}}
batch: {{global_batch_size: 8, micro_batch_size: 4}}
optimizer: {{learning_rate: 1e-2, schedule: {{kind: cosine, warmup_steps: 3}}}}
memory: {{precision: fp32}}
checkpoint: {{save_steps: 3, keep_last: 2, keep_best: 1}}
evaluate: {{eval_steps: 6}}
monitor: {{tensorboard: false, curve: false}}
"""


def write_recipe(folder: Path, *, steps: int = 30) -> Path:
    """A recipe on the shortest text that still has uneven documents."""
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "lines.txt"
    text.write_text("\n".join("abcdefghij klmnop"[: 3 + n % 14] * (1 + n % 5) for n in range(400)))
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(folder=folder / "runs", text=text, steps=steps))
    return path


def start(recipe: Path, *overrides: str, prepare: Callable[[], None] | None = None) -> Any:
    """The run goes on in a process of its own; its exit code is the command's."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["danlu.train.loop", "danlu.cli.main", "danlu.checkpoint.model"])
    process = context.Process(target=_go, args=(recipe, overrides, prepare))
    process.start()
    return process


def finish(recipe: Path, *overrides: str, prepare: Callable[[], None] | None = None, seconds: float = 90) -> int:
    """The run's exit code, once it has ended."""
    process = start(recipe, *overrides, prepare=prepare)
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        raise AssertionError(f"the run did not end within {seconds} seconds")
    return process.exitcode


def metrics(recipe: Path) -> list[dict[str, Any]]:
    """What each update came to, without what only a clock can know."""
    lines = (recipe.parent / "runs" / "fault" / "metrics.jsonl").read_text().splitlines()
    kept = ("step", "loss", "learning_rate", "grad_norm", "tokens", "sound", "eval_loss", "loss/language")
    return [{key: line[key] for key in kept if key in line} for line in map(json.loads, lines)]


def events(recipe: Path) -> list[dict[str, Any]]:
    """What happened, in order."""
    return [json.loads(line) for line in (recipe.parent / "runs" / "fault" / "events.jsonl").read_text().splitlines()]


def said(recipe: Path) -> str:
    """All that the runs of this recipe wrote to the terminal."""
    return (recipe.parent / "said.txt").read_text(errors="replace")


def _go(recipe: Path, overrides: tuple[str, ...], prepare: Callable[[], None] | None) -> None:
    from danlu.cli.main import main
    from danlu.data.source import Rows

    out = os.open(recipe.parent / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    take = Rows.take

    def logged(rows: Rows, micros: int) -> Any:
        at = rows.samples
        batches = take(rows, micros)
        with (recipe.parent / "samples.txt").open("a") as file:
            file.write(json.dumps([at, [sample for batch in batches for sample in batch.samples]]) + "\n")
        return batches

    Rows.take = logged  # type: ignore[method-assign]
    if prepare is not None:
        prepare()
    raise SystemExit(main(["train", str(recipe), *overrides]))
