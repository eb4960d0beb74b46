"""A reduction runs while the backward goes on, by the trace of a profiler; and what it gives."""

from __future__ import annotations

import time
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from danlu.compute.mesh import Parallel
from danlu.compute.shard import shard
from danlu.compute.traffic import FLYING, Reduction
from danlu.core.world import World
from tests.ranks import Ranks


class Send(torch.autograd.Function):
    """Its backward begins three reductions before the first is waited for."""

    @staticmethod
    def forward(ctx, given, reduction, rank, outs):
        ctx.more = reduction, rank, outs
        return given.clone()

    @staticmethod
    def backward(ctx, gradient):
        reduction, rank, outs = ctx.more
        for scale in (1.0, 10.0, 100.0):
            own = torch.tensor([1.0, 2.0, 3.0, 4.0]) * scale * (1 + rank)
            outs.append(torch.full((2,), torch.nan))
            reduction(outs[-1], own, dist.group.WORLD, dist.ReduceOp.SUM)
        assert len(reduction._flying) == FLYING
        return gradient, None, None, None


def sums(world: World) -> list[list[float]]:
    outs: list[torch.Tensor] = []
    Send.apply(torch.ones(1, requires_grad=True), Reduction(), world.rank, outs).backward()
    return [out.tolist() for out in outs]


def test_each_rank_gets_its_part_of_the_sum(ranks: Ranks) -> None:
    first, second = ranks.run(sums, size=2)
    assert first == [[3.0, 6.0], [30.0, 60.0], [300.0, 600.0]]
    assert second == [[9.0, 12.0], [90.0, 120.0], [900.0, 1200.0]]


class Tap(torch.autograd.Function):
    """The same; calls when the gradient passes, or before it may."""

    @staticmethod
    def forward(ctx, given, call):
        ctx.call = call
        return given.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.call()
        return gradient, None


class Block(nn.Module):
    """A matrix product between two taps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.before, self.after = lambda: None, lambda: None  # its backward

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return Tap.apply(self.linear(Tap.apply(hidden, self.after)), self.before)


def trace(world: World, sign: str, beside: bool) -> dict[str, list[tuple[float, float]]]:
    """Spans of a backward on this rank: of its reductions, and of its matrix products, in their order.

    beside: the second rank begins the last block's backward only when it is told that the first rank has made that of
    the block before it. Were reductions waited for on the spot, the first would wait for the second for ever.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    blocks = [cast(Block, block) for block in model]
    shards = shard(model, blocks, mesh=Parallel(shard=2).mesh("cpu"), weights=torch.float32)
    shards.begin(first=True, last=True)
    assert shards.reduction is not None
    shards.reduction.hurry = not beside
    if beside and world.first:
        blocks[1].after = Path(sign).touch
    elif beside:
        blocks[2].before = lambda: _wait(Path(sign))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(torch.randn(8, 64, requires_grad=True)).sum().backward()
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    return {
        name: [(event.time_range.start, event.time_range.end) for event in events if event.name == name]
        for name in ("gloo:all_to_all", "aten::mm")
    }


def _wait(sign: Path) -> None:
    until = time.monotonic() + 50
    while not sign.exists():
        assert time.monotonic() < until, "the first rank waited for the reduction"
        time.sleep(0.001)


def test_a_reduction_runs_beside_the_backward_of_the_block_before(ranks: Ranks, tmp_path: Path) -> None:
    first, _ = ranks.run(trace, str(tmp_path / "sign"), True, size=2)
    reductions, products = first["gloo:all_to_all"], first["aten::mm"]
    assert len(reductions) == 3 and len(products) == 6  # by the input and by the weight, of each block
    assert max(end for _, end in products[2:4]) < reductions[0][1]


def test_a_hurried_reduction_is_waited_for_on_the_spot(ranks: Ranks, tmp_path: Path) -> None:
    for made in ranks.run(trace, str(tmp_path / "sign"), False, size=2):
        reductions, products = made["gloo:all_to_all"], made["aten::mm"]
        assert min(start for start, _ in products[2:4]) >= reductions[0][1]
