"""Checkpoints for tests: tensors whose every value follows from the step, saved by as many ranks as are asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from danlu.checkpoint.disk import Disk
from danlu.checkpoint.keep import Checkpoint
from danlu.checkpoint.load import Found, Want, read
from danlu.checkpoint.pieces import Piece
from danlu.checkpoint.save import NotSaved, Saved, Saver, Snapshot

NOW = Checkpoint(asynchronous=False)


def tensors(step: int, rows: int = 8) -> dict[str, Tensor]:
    """What a run holds at a step: several types, a scalar, an empty tensor, values that follow from the step."""
    grid = torch.arange(rows * 3, dtype=torch.float32).reshape(rows, 3)
    return {
        "model.weight": grid + 1000.0 * step,
        "model.half": (grid[:, 0] + step).bfloat16(),
        "moment.model.weight": grid.double() / (step + 1),
        "moment.step": torch.tensor(float(step)),
        "model.none": torch.empty(0, 3),
    }


def shares(whole: dict[str, Tensor], rank: int, world: int) -> dict[str, Piece]:
    """A rank's pieces: rows are shared out (unevenly where they must be), what has no rows goes to the last rank."""
    pieces = {}
    for name, tensor in whole.items():
        if tensor.dim() == 0 or not len(tensor):
            if rank == world - 1:
                pieces[name] = Piece.whole(tensor)
            continue
        first, last = len(tensor) * rank // world, len(tensor) * (rank + 1) // world
        offset = (first, *[0] * (tensor.dim() - 1))
        pieces[name] = Piece(tensor=tensor[first:last], shape=tuple(tensor.shape), offset=offset)
    return pieces


def snapshot(step: int, rank: int = 0, world: int = 1, *, metric: float | None = None, rows: int = 8) -> Snapshot:
    """A rank's snapshot of a step."""
    return Snapshot(
        step=step,
        pieces=shares(tensors(step, rows), rank, world),
        facts={"samples": step * 32, "rate": 0.1 + step},
        streams={"cpu": torch.tensor([rank, step % 251], dtype=torch.uint8)},
        metric=metric,
    )


def each_rank(world: int, work: Callable[[int], Any]) -> list[Any]:
    """What work(rank) gives or raises on as many threads as ranks."""
    results: list[Any] = [None] * world

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def save(
    folder: Path,
    *steps: int,
    world: int = 1,
    settings: Checkpoint = NOW,
    disks: dict[int, Disk] | None = None,
    wait_seconds: float = 20,
    metrics: dict[int, float] | None = None,
    rows: int = 8,
) -> list[list[Saved | NotSaved]]:
    """The steps are saved one after the other by so many ranks; the outcomes rank by rank; raises what they did."""

    def work(rank: int) -> list[Saved | NotSaved]:
        disk = (disks or {}).get(rank)
        attempt = "t" if world > 1 else ""
        saver = Saver(folder, settings, rank=rank, world=world, attempt=attempt, wait_seconds=wait_seconds, disk=disk)
        outcomes = []
        for step in steps:
            metric = (metrics or {}).get(step)
            outcomes += saver.save(snapshot(step, rank, world, metric=metric, rows=rows))
        return outcomes + saver.finish()

    results = each_rank(world, work)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def holds(found: Found, rows: int = 8) -> None:
    """Fails unless the checkpoint gives back exactly what its step held."""
    expected = tensors(found.step, rows)
    got = read(found, {name: Want.whole(tensor) for name, tensor in expected.items()})
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name
    assert found.manifest.facts == {"samples": found.step * 32, "rate": 0.1 + found.step}
