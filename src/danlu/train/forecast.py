"""How much memory a run needs on each rank: what every room says of its part, put together for the ledger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from danlu.compute.mesh import Parallel
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
        for state in recipe.optimizer.states(weight.shape, dtype=precision.weights, role=role[name]).values()
    ]
    shards = int(parallel.shard)
    whole = Case(
        shape=shape,
        parameters=sum(weight.numel() for weight in named.values()),
        sequence_length=length,
        rows=share,
        micros=1,
        weight=precision.weights.itemsize,
        product=precision.products.itemsize,
        moments=sum(state.bytes if state.whole else state.bytes // shards for state in kept),
        path=attention.choose(device, precision.products, length) if recipe.data.packing else None,
        kinds=(),
        shards=shards,
        gathered=parallel.ranks > 1,
    )

    def of(rows: int) -> Case:
        cut = replace(whole, rows=rows, micros=share // rows)
        return replace(cut, kinds=choose(recipe.memory.recompute, cut))

    return of


def fitting(of: Sizes, parallel: Parallel, device: torch.device, *, share: int) -> int:
    """Rows of the largest micro-batch whose forecast fits in what is free now."""
    free = int(ROOM * free_for_one(device, parallel))
    return rows_that_fit(lambda rows: forecast(of(rows)).peak, rows=share, free_bytes=free)


def free_for_one(device: torch.device, parallel: Parallel) -> int:
    """Bytes that one rank may take: of a CPU's memory its part, of a GPU's all that is free."""
    return devices.memory(device).free // (parallel.ranks if device.type == "cpu" else 1)
