"""How much memory a run needs on each rank: what every room says of its part, put together for the ledger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from danlu.compute.mesh import Parallel
from danlu.compute.zero import Shapes, held, shapes
from danlu.core import device as devices
from danlu.memory.ledger import Case, choose, forecast
from danlu.memory.offload import Offload
from danlu.memory.plan import ROOM, rows_that_fit
from danlu.memory.precision import Precision
from danlu.memory.states import MOVING, portion
from danlu.models import attention, heads
from danlu.models.families import Family
from danlu.models.roles import roles
from danlu.models.stack import plain
from danlu.optim.average import KIND
from danlu.optim.common import Kept
from danlu.recipe.recipe import Recipe

ALL_HERE = Offload()
WHOLE = ("adamw", "sgd")  # optimisers whose kernels move a weight in one pass, without memory of their own
OWN, ROUNDED = 8, 20  # bytes for each number of the largest weight that others take, and stochastic rounding does
Sizes = Callable[[int], Case]  # rows of a micro-batch -> what decides the bytes of an update


def sizes(
    recipe: Recipe,
    family: Family,
    precision: Precision,
    parallel: Parallel,
    device: torch.device,
    *,
    share: int,
    away: Offload = ALL_HERE,
) -> Sizes:
    """What decides the bytes of an update on one rank that has `share` rows of it, for any micro-batch."""
    shape, length = family.shape(), recipe.data.sequence_length
    with torch.device("meta"):
        model = family.build()
    named, role = {plain(name): weight for name, weight in model.named_parameters()}, roles(model)
    kept = [
        (kind, state)
        for name, weight in named.items()
        for kind, state in recipe.optimizer.kept(weight.shape, dtype=precision.weights, role=role[name]).items()
    ]
    shards, wide = int(parallel.shard), precision.weights.itemsize
    groups = shapes(model.blocks.values(), model)
    numbers = [weight.numel() for weight in named.values()]
    working = ROUNDED if precision.pure else 0 if recipe.optimizer.kind in WHOLE else OWN
    alone = Case(
        shape=shape,
        parameters=sum(numbers),
        sequence_length=length,
        rows=1,
        micros=share,
        weight=wide,
        product=precision.products.itemsize,
        weights=wide * sum(numbers),
        gradients=wide * sum(numbers),
        moments=sum(_part(state, shards) for _, state in kept),
        working=working * max(numbers) // shards,
        path=attention.choose(device, precision.attention, length) if recipe.data.packing else None,
        waiting=away.activations,
        block=heads.BLOCK if device.type == "cpu" else heads.BLOCK_DEVICE,
    )

    def of(rows: int) -> Case:
        case = replace(alone, rows=rows, micros=share // rows)
        if parallel.ranks > 1 or away.weights:
            case = _cut(case, groups, parallel, overlapped=device.type == "cpu")
        if away.weights or away.states != "beside":
            case = _elsewhere(case, away, average=sum(_part(state, shards) for kind, state in kept if kind == KIND))
        return replace(case, kinds=choose(recipe.memory.recompute, case))

    return of


def _cut(case: Case, groups: tuple[list[Shapes], Shapes], parallel: Parallel, *, overlapped: bool) -> Case:
    """The case with weights cut over ranks, gathered for use, and gradients under way."""
    there = held(
        *groups,
        shard=int(parallel.shard),
        zero=parallel.zero,
        micros=case.micros,
        weight_bytes=case.weight,
        reduce_bytes=max(4, case.weight),
        overlapped=overlapped,
    )
    return replace(case, weights=there.weights, gradients=there.gradients, gathered=there.gathered, travel=there.travel)


def _elsewhere(case: Case, away: Offload, *, average: int) -> Case:
    """The case with what lies on the host or a disk taken off the device. average: bytes of the weights' average, which
    stays with the weights wherever the optimiser's states lie."""
    if away.weights:  # and their gradients and states, which are updated there
        gone = case.weights + case.gradients + case.moments
        return replace(case, weights=0, gradients=case.gathered, moments=0, working=0, elsewhere=gone)
    states = case.moments - average
    moving = MOVING * portion(case.parameters) * states // case.parameters  # of states on their way
    return replace(case, moments=average, working=case.working + min(states, moving), elsewhere=states)


def _part(state: Kept, shards: int) -> int:
    """Bytes of it on one rank."""
    return state.bytes if state.whole else state.bytes // shards


def fitting(of: Sizes, parallel: Parallel, device: torch.device, *, share: int) -> int:
    """Rows of the largest micro-batch whose forecast fits in what is free now."""
    free = int(ROOM * free_for_one(device, parallel))
    return rows_that_fit(lambda rows: forecast(of(rows)).peak, rows=share, free_bytes=free)


def free_for_one(device: torch.device, parallel: Parallel) -> int:
    """Bytes that one rank may take: of a CPU's memory its part, of a GPU's all that is free."""
    return devices.memory(device).free // (parallel.ranks if device.type == "cpu" else 1)
