"""A micro-batch that was forecast to fit is tried before anything is trained; and what is said when memory runs out."""

from __future__ import annotations

import ctypes
import gc
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial

import psutil
import torch

from danlu.core import device as devices
from danlu.core import words
from danlu.core.batch import Batch
from danlu.core.errors import Failure
from danlu.core.world import once
from danlu.memory.ledger import Case, forecast
from danlu.memory.plan import ROOM, Memory
from danlu.memory.recompute import KINDS
from danlu.memory.shortage import ran_out, sentence
from danlu.memory.tracker import Tracker
from danlu.train.assemble import Materials, build
from danlu.train.forecast import Sizes, free_for_one
from danlu.train.step import step

AMPLE = 2.0  # free memory, against the forecast, from which a CPU's micro-batch is not tried
DOCUMENTS = 2  # in a row of the worst case: more of them cost no more memory


class Still:
    """A source of batches that is only asked how many tokens there were."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.waited = tokens, 0.0

    def take(self, micros: int) -> list[Batch]:
        """Nothing: batches are given."""
        return []

    def state(self) -> dict[str, int]:
        """Nothing."""
        return {}

    def pass_over(self, state: Mapping[str, int]) -> None:
        """Nothing."""

    def seek(self, state: Mapping[str, int]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def proven(materials: Materials, *, announce: Callable[[str], None]) -> Materials:
    """The same, with a micro-batch that two worst-case updates were really made with, where it was a forecast's.

    They are made by a run of their own, which is thrown away: nothing of the real one has moved. Where memory runs out
    the next smaller divisor is tried, and said. Not tried where a CPU has ample room. A micro-batch that was given is
    taken, with a warning where the forecast is above what is free.
    """
    rows, world = materials.case.rows, materials.world
    free = once(world, lambda: free_for_one(materials.device, materials.recipe.parallel))  # all ranks decide alike
    need = forecast(materials.case).peak
    if not materials.untried:
        if need > free:
            less = remedies(materials.case, materials.sizes, materials.recipe.memory, materials.device)
            announce(
                f"warning: {words.size(need)} of tensors are forecast and {words.size(free)} are free; less would be "
                f"needed with {', or '.join(less) or 'a smaller data.sequence_length'}"
            )
        return materials
    if materials.device.type == "cpu" and AMPLE * need <= free:
        announce(f"batch.micro_batch_size: {rows}; {words.size(need)} forecast of {words.size(free)} free, not tried")
        return replace(materials, untried=False)
    share = rows * materials.case.micros
    for size in (size for size in range(rows, 0, -1) if share % size == 0):
        there = resized(materials, size)
        begun = time.perf_counter()
        try:
            most = worst(there)
            held: int | None = once(world, partial(int, most))
        except BaseException as error:
            if not ran_out(error):
                raise
            if world.size > 1:
                raise _failure(there, error, "while batch.micro_batch_size was tried", free) from error
            held = None
        _tidy(materials.device)
        tried = f"tried in {time.perf_counter() - begun:.1f} s"
        if held is not None and held <= (free if materials.device.type == "cuda" else ROOM * free):
            announce(
                f"batch.micro_batch_size: {size}; {words.size(held)} held at most, "
                f"{words.size(forecast(there.case).peak)} forecast, of {words.size(free)} free; {tried}"
            )
            return there
        what = "memory ran out" if held is None else f"{words.size(held)} of {words.size(free)} free"
        announce(f"batch.micro_batch_size: {size} does not fit ({what}; {tried})")
    raise Failure(_told(materials, "with a single row", free))


def resized(materials: Materials, rows: int) -> Materials:
    """The same with micro-batches of so many rows, which were tried."""
    recipe = replace(materials.recipe, batch=replace(materials.recipe.batch, micro_batch_size=rows))
    if materials.held is not None:
        materials.held.batch_size = rows
    return replace(materials, recipe=recipe, untried=False)


def worst(materials: Materials) -> int:
    """Bytes that tensors held at most in the second of two updates of the largest rows that can come.

    With a label everywhere, and several documents a row where rows are packed; the second update has moments and, in
    its second micro-batch, gradients from the start. On a GPU: bytes that torch took from it; where blocks are
    compiled for a CPU: bytes by which the process grew.
    """
    device = materials.device
    _tidy(device)
    before = psutil.Process().memory_info().rss
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    batches = [largest(materials) for _ in range(min(2, materials.micros))]
    run = build(materials)
    run.source = Still(sum(batch.tokens.numel() for batch in batches))
    run.memory.restore({"loss_scale": 1.0, "sound": 0})  # an overflow, in fp16, would leave no moments
    step(run, batches)
    tracker = None if device.type == "cuda" or materials.compiled.on else Tracker()
    if tracker is not None:
        tracker.hold("weights", run.weights.values())
        tracker.hold("moments", run.optim.here())
    with tracker or nullcontext():
        step(run, batches)
    devices.synchronize(device)
    if tracker is not None:
        return tracker.peak
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)


def largest(materials: Materials) -> Batch:
    """A micro-batch than which none holds more."""
    case = materials.case
    shape, length = (case.rows, case.sequence_length), case.sequence_length
    tokens = torch.arange(case.tokens).remainder(case.shape.vocab_size).view(shape)
    several = case.path is not None and length >= DOCUMENTS
    documents = torch.arange(length).mul(DOCUMENTS).div(length, rounding_mode="floor") * several
    return Batch(
        tokens=tokens,
        labels=tokens.clone(),
        positions=torch.arange(length).repeat(case.rows, 1),
        documents=documents.repeat(case.rows, 1),
        packed=several,
        samples=("",) * case.rows,
    )


@contextmanager
def explained(materials: Materials) -> Iterator[None]:
    """Where memory runs out inside, the failure says by how much the run was forecast, by part, and what would do."""
    free = free_for_one(materials.device, materials.recipe.parallel)
    try:
        yield
    except BaseException as error:
        if isinstance(error, Failure) or not ran_out(error):
            raise
        where = " ".join(getattr(error, "__notes__", [])).rstrip(":")
        raise _failure(materials, error, where, free) from error


def _failure(materials: Materials, error: BaseException, where: str, free: int) -> Failure:
    asked = " ".join(str(error).split())
    return Failure(_told(materials, where, free) + (f" ({asked[:200]})" if asked else ""))


def _told(materials: Materials, where: str, free: int) -> str:
    less = remedies(materials.case, materials.sizes, materials.recipe.memory, materials.device)
    return sentence(where, forecast(materials.case), free=free, remedies=less)


def remedies(case: Case, sizes: Sizes, memory: Memory, device: torch.device) -> Iterator[str]:
    """Settings that would need less, with how much where the ledger knows."""
    share, now = case.rows * case.micros, forecast(case).peak
    smaller = next((rows for rows in range(case.rows - 1, 0, -1) if share % rows == 0), None)
    cases = {} if smaller is None else {f"batch.micro_batch_size={smaller}": sizes(smaller)}
    for kind in KINDS:
        cases[f"memory.recompute={kind}"] = replace(case, kinds=(kind,) * case.shape.layers)
    for setting, other in cases.items():
        if (need := forecast(other).peak) < now:
            yield f"{setting} ({words.size(need)})"
    if device.type != "cpu":
        if not memory.offload:
            yield "memory.offload=[optimizer]"
        yield "more ranks to cut the weights over (parallel.shard)"


def _tidy(device: torch.device) -> None:
    """What was tried has left the memory, as far as the allocators let it go."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        with suppress(OSError, AttributeError):  # a C library without it
            ctypes.CDLL(None).malloc_trim(0)
