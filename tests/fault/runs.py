"""Whole runs in processes of their own, forked from one that has imported everything: half a second instead of four."""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECIPE = """
name: fault
folder: {folder}
max_steps: {steps}
model: {{kind: llama, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
         intermediate_size: 64, max_position_embeddings: 64, tie_word_embeddings: true}}
data: {{tokenizer: byte, train: [{text}], validation: 0.1, sequence_length: 32, split: line}}
batch: {{global_batch_size: 8}}
optimizer: {{learning_rate: 1e-2, schedule: {{kind: cosine, warmup_steps: 3}}}}
memory: {{precision: fp32}}
checkpoint: {{save_steps: 3, keep_last: 2, keep_best: 1}}
evaluate: {{eval_steps: 6}}
monitor: {{tensorboard: false, curve: false}}
"""
PRELOAD = ["danlu.train.loop", "danlu.cli.main", "danlu.cli.train", "danlu.checkpoint.model", "danlu.launch.local"]
LIMIT_SECONDS = 120.0

Prepare = Callable[[], None]


def write_recipe(folder: Path, *, steps: int = 30) -> Path:
    """A recipe on the shortest text that still has uneven documents."""
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "lines.txt"
    text.write_text("\n".join("abcdefghij klmnop"[: 3 + n % 14] * (1 + n % 5) for n in range(400)))
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(folder=folder / "runs", text=text, steps=steps))
    return path


@dataclass(frozen=True)
class Moment:
    """When a function is called for the `number`-th time in a process (on one rank), something is done first.

    What is done: a signal to the process itself; or, with `fault` given, that error is raised in the caller.
    """

    module: str
    name: str  # of a function, or Class.method
    number: int = 1
    signal: int = signal.SIGKILL
    rank: int = 0
    fault: str = ""
    every: bool = False  # from then on

    def __call__(self) -> None:
        """The process is prepared."""
        if int(os.environ.get("RANK", "0")) != self.rank:
            return
        owner: Any = importlib.import_module(self.module)
        *path, name = self.name.split(".")
        for part in path:
            owner = getattr(owner, part)
        whole, calls = getattr(owner, name), 0

        def watched(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == self.number or (self.every and calls > self.number):
                if self.fault:
                    raise RuntimeError(self.fault)
                os.kill(os.getpid(), self.signal)
            return whole(*arguments, **named)

        setattr(owner, name, watched)


@dataclass(frozen=True)
class Gate:
    """A run goes on only as far as the number in a file says, however fast it is, and says beside it how far it is.

    Where it waits, signals are heard; `told` knows of which ranks.
    """

    path: Path

    def open(self, until: int) -> None:
        """The run may make so many updates in all."""
        _replace(self.path, until)

    def at(self) -> int:
        """Updates that are made (before the first one of a life: those of the life before)."""
        return _number(self.path.with_suffix(".at"))

    def told(self, rank: int) -> bool:
        """Whether a signal has reached this rank."""
        return self.path.with_suffix(f".told-{rank}").exists()

    def __call__(self) -> None:
        """The process is prepared."""
        from danlu.train import loop
        from danlu.train.signals import Told

        rank, whole, hear = int(os.environ.get("RANK", "0")), loop.step, Told.hear

        def step(run: Any, *rest: Any) -> Any:
            while run.step >= _number(self.path):
                time.sleep(0.005)
            made = whole(run, *rest)
            if rank == 0:
                _replace(self.path.with_suffix(".at"), run.step)
            return made

        def heard(told: Any, *arguments: Any) -> None:
            hear(told, *arguments)
            self.path.with_suffix(f".told-{rank}").touch()

        loop.step, Told.hear = step, heard  # type: ignore[assignment, method-assign]


def _replace(path: Path, number: int) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(str(number))
    part.replace(path)


def _number(path: Path) -> int:
    return int(path.read_text()) if path.exists() else 0


def start(recipe: Path, *overrides: str, prepare: Prepare | None = None, ranks: int = 1) -> list[Any]:
    """The run goes on in processes of its own, one a rank; the exit code of each is the command's."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    port = _free_port() if ranks > 1 else 0
    processes = [
        context.Process(target=_go, args=(recipe, overrides, prepare, rank, ranks, port)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    return processes


def end(processes: list[Any], *, seconds: float = LIMIT_SECONDS) -> list[int]:
    """The exit codes, once all have ended by themselves."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    late = [process for process in processes if process.exitcode is None]
    for process in late:
        process.kill()
        process.join()
    assert not late, f"{len(late)} of {len(processes)} ranks did not end within {seconds} seconds"
    return [process.exitcode for process in processes]


def finish(recipe: Path, *overrides: str, prepare: Prepare | None = None, ranks: int = 1) -> int:
    """The run's exit code, once it has ended; all ranks have the same."""
    codes = set(end(start(recipe, *overrides, prepare=prepare, ranks=ranks)))
    assert len(codes) == 1, codes
    return codes.pop()


def folder(recipe: Path) -> Path:
    """The run's folder."""
    return recipe.parent / "runs" / "fault"


def metrics(recipe: Path) -> list[dict[str, Any]]:
    """What each update came to, without what only a clock can know."""
    lines = (folder(recipe) / "metrics.jsonl").read_text().splitlines()
    kept = ("step", "loss", "learning_rate", "grad_norm", "tokens", "sound", "eval_loss", "loss/language")
    return [{key: line[key] for key in kept if key in line} for line in map(json.loads, lines)]


def events(recipe: Path, *names: str) -> list[dict[str, Any]]:
    """What happened, in order; only events of these names, if any are given."""
    lines = (folder(recipe) / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if not names or event["event"] in names]


def said(recipe: Path) -> str:
    """All that the runs of this recipe wrote to the terminal."""
    return (recipe.parent / "said.txt").read_text(errors="replace")


def forget_said(recipe: Path) -> None:
    """What was said so far is no more."""
    with open(recipe.parent / "said.txt", "w"):
        pass


def samples(recipe: Path) -> dict[tuple[int, int], list[str]]:
    """The ids that each rank read at each position; a position that was read twice must have given the same ids."""
    seen: dict[tuple[int, int], list[str]] = {}
    for line in (recipe.parent / "samples.txt").read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # cut off by a kill
            rank, at, ids = json.loads(line)
            assert seen.setdefault((rank, at), ids) == ids
    return seen


def weights(recipe: Path) -> bytes:
    """The published model's file."""
    return (folder(recipe) / "model" / "model.safetensors").read_bytes()


def same(recipe: Path, reference: Path) -> None:
    """The two runs were the same to the bit: each update once, the data, the published weights, the last checkpoint."""
    assert metrics(recipe) == metrics(reference)
    assert samples(recipe) == samples(reference)
    assert weights(recipe) == weights(reference)
    ours, theirs = (sorted((folder(r) / "checkpoints").glob("step-*"))[-1] for r in (recipe, reference))
    assert ours.name == theirs.name
    shards = sorted(path.name for path in theirs.glob("*.safetensors"))
    assert shards and all((ours / name).read_bytes() == (theirs / name).read_bytes() for name in shards)


def _free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return made.getsockname()[1]


def log_samples(path: Path) -> None:
    """Every batch that this process takes is written down: rank, position, ids."""
    from danlu.data.source import Rows

    take = Rows.take

    def logged(rows: Rows, micros: int) -> Any:
        at = rows.samples
        batches = take(rows, micros)
        ids = [sample for batch in batches for sample in batch.samples]
        with path.open("a") as file:
            file.write(json.dumps([rows.rank, at, ids]) + "\n")
        return batches

    Rows.take = logged  # type: ignore[method-assign]


def _go(recipe: Path, overrides: tuple[str, ...], prepare: Prepare | None, rank: int, ranks: int, port: int) -> None:
    from danlu.cli.main import main

    out = os.open(recipe.parent / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if ranks > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    log_samples(recipe.parent / "samples.txt")
    if prepare is not None:
        prepare()
    raise SystemExit(main(["train", str(recipe), *overrides]))
