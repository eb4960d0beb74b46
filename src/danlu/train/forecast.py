"""How much memory a run needs on each rank: what every room says of its part, put together for the ledger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from danlu.compute.mesh import Parallel
from danlu.compute.zero import held, shapes
from danlu.core import device as devices
from danlu.memory.ledger import Case, choose, forecast
from danlu.memory.plan import ROOM, rows_that_fit
from danlu.memory.precision import Precision
from danlu.models import attention
from danlu.models.families import Family
from danlu.models.roles import roles
from danlu.models.stack import plain
from danlu.recipe.recipe import Recipe

Sizes = Callable[[int], Case]  # rows of a micro-batch -> what decides the bytes of an update


def sizes(
    recipe: Recipe, family: Family, precision: Precision, parallel: Parallel, device: torch.device, *, share: int
) -> Sizes:
    """What decides the bytes of an update on one rank that has `share` rows of it, for any micro-batch."""
    shape, length = family.shape(), recipe.data.sequence_length
    with torch.device("meta"):
        model = family.build()
    named, role = {plain(name): weight for name, weight in model.named_parameters()}, roles(model)
    kept = [
        state
        for name, weight in named.items()
        for state in recipe.optimizer.kept(weight.shape, dtype=precision.weights, role=role[name]).values()
    ]
    shards, wide = int(parallel.shard), precision.weights.itemsize
    groups = shapes(model.blocks.values(), model)

    def of(rows: int) -> Case:
        micros = share // rows
        case = Case(
            shape=shape,
            parameters=sum(weight.numel() for weight in named.values()),
            sequence_length=length,
            rows=rows,
            micros=micros,
            weight=wide,
            product=precision.products.itemsize,
            weights=wide * sum(weight.numel() for weight in named.values()),
            gradients=wide * sum(weight.numel() for weight in named.values()),
            moments=sum(state.bytes if state.whole else state.bytes // shards for state in kept),
            path=attention.choose(device, precision.attention, length) if recipe.data.packing else None,
        )
        if parallel.ranks > 1:
            there = held(
                *groups,
                shard=shards,
                zero=parallel.zero,
                micros=micros,
                weight_bytes=wide,
                reduce_bytes=max(4, wide),
                overlapped=device.type == "cpu",
            )
            case = replace(
                case,
                weights=there.weights,
                gradients=there.gradients,
                gathered=there.gathered,
                travel=there.travel,
            )
        return replace(case, kinds=choose(recipe.memory.recompute, case))

    return of


def fitting(of: Sizes, parallel: Parallel, device: torch.device, *, share: int) -> int:
    """Rows of the largest micro-batch whose forecast fits in what is free now."""
    free = int(ROOM * free_for_one(device, parallel))
    return rows_that_fit(lambda rows: forecast(of(rows)).peak, rows=share, free_bytes=free)


def free_for_one(device: torch.device, parallel: Parallel) -> int:
    """Bytes that one rank may take: of a CPU's memory its part, of a GPU's all that is free."""
    return devices.memory(device).free // (parallel.ranks if device.type == "cpu" else 1)
