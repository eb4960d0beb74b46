"""ZeRO's three stages (arXiv:1910.02054) by FSDP2: what each holds of a model on a rank, and when gradients travel.

Over `shard` ranks every weight, its gradient (once reduced) and its optimiser state are cut along their first dim;
`replicate` groups of such ranks hold the same. Whole weights exist beside the cut ones only while they are needed:

zero  weights are gathered                       gradients are reduced
3     a block at a time, for its forward, and    with every micro-batch, a block at a time
      again for its backward; what stands outside
      of blocks from forward to backward
2     once an update: whole from its first        with every micro-batch, a block at a time
      forward to the end of its last backward
1     as 2                                        once an update, with its last micro-batch; until then they are whole

Over replicas gradients are always reduced once an update, already cut. One micro-batch an update makes 1 the same as 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from danlu.compute.traffic import Reduction

Zero = Literal[1, 2, 3]
Shapes = Sequence[Sequence[int]]


class Shards:
    """A model cut over ranks: what is gathered and what travels, micro-batch by micro-batch.

    reduction: what adds gradients up between CPUs; None where FSDP2 does it by streams.
    """

    def __init__(self, model: nn.Module, *, zero: Zero, replicate: int, reduction: Reduction | None) -> None:
        assert isinstance(model, FSDPModule)
        self.model, self.zero, self.replicate, self.reduction = model, zero, replicate, reduction
        self.left = False  # whether earlier micro-batches of the update left sums, to which is added

    def begin(self, *, first: bool, last: bool, alone: bool = False) -> None:
        """The next forward and backward are those of a micro-batch, the first or the last of an update or neither.

        alone: its gradients travel all the way by themselves, so that after it they are there on every rank.
        Autocast's copies of weights are made anew. Those of an earlier micro-batch would be used without being
        gathered, and autograd, which takes what was made last first, would come to them after FSDP2 has reduced: their
        gradients would be lost.
        """
        torch.clear_autocast_cache()
        travel = last or alone or self.zero > 1
        adds, self.left = self.left and not first, travel or (self.left and not first)
        self.model.set_requires_gradient_sync(travel)
        if self.zero > 1:
            self.model.set_requires_all_reduce(last or alone)
        if self.zero < 3:
            self.model.set_reshard_after_backward(last)
        if self.reduction is not None:
            self.reduction.hurry = adds or self.replicate > 1

    def release(self) -> None:
        """No weight is gathered any more. To be called between updates only.

        A forward without a backward leaves weights gathered; those would be stale once the cut ones are written to.
        """
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes of one rank, at most, by what they are for.

    weights    the cut weights, all the time
    gathered   whole weights beside them, from the first forward of an update to the end of its last backward
    gradients  from the first backward to the end of the update; whole ones included
    moments    the optimiser's, all the time from the first update
    travel     buffers of gathers and reductions under way
    """

    weights: int
    gathered: int
    gradients: int
    moments: int
    travel: int


def held(
    blocks: Sequence[Shapes],
    rest: Shapes,
    *,
    shard: int,
    zero: Zero,
    micros: int = 1,
    weight_bytes: int = 4,
    reduce_bytes: int = 4,
    moment_bytes: int = 8,
    overlapped: bool = True,
) -> Held:
    """What the first rank holds of a model of `blocks` and the `rest`, each given by the shapes of its weights.

    With n(group) = numbers of a group's weights, cut(group) the same with each first dim divided by `shard` and
    rounded up, whole(group) = shard * cut(group), N and C their sums over all groups, B the largest block:

        weights    weight_bytes * C
        moments    moment_bytes * C      (moment_bytes: of all moments of one weight; AdamW: 2 x 4)
        gathered   weight_bytes * (zero 3: whole(rest) + whole(B); else the sum of all whole(group))
        gradients  weight_bytes * (zero 1 with several micro-batches: N + C; else C + n(largest group))
        travel     zero 3: weight_bytes * whole(B) for the gather of the next block, else of the largest group;
                   and reduce_bytes * whole(largest group) that is sent, twice that again where parts of another
                   reduction are received meanwhile (`overlapped`: between CPUs)

    `replicate` does not enter: each replica holds as much. Other ranks hold as much or, where `shard` does not divide
    a first dim, a few rows less. In one process there is nothing to gather: weights, gradients, moments only.
    """
    groups = [*blocks, rest]
    cut = sum(_cut(group, shard) for group in groups)
    numbers = [sum(math.prod(shape) for shape in group) for group in groups]
    whole = [shard * _cut(group, shard) for group in groups]
    block = max(whole[:-1], default=0)
    largest = max(whole)
    reductions = (4 if overlapped else 1) * reduce_bytes * largest
    return Held(
        weights=weight_bytes * cut,
        moments=moment_bytes * cut,
        gathered=weight_bytes * (whole[-1] + block if zero == 3 else sum(whole)),
        gradients=weight_bytes * (sum(numbers) + cut if zero == 1 and micros > 1 else cut + max(numbers)),
        travel=weight_bytes * (block if zero == 3 else largest) + reductions,
    )


def shapes(blocks: Iterable[nn.Module], model: nn.Module) -> tuple[list[Shapes], Shapes]:
    """The shapes of each block's weights and of the rest's, as `held` asks for them; a tied weight counts once."""
    inside = [list(block.parameters()) for block in blocks]
    known = {id(weight) for block in inside for weight in block}
    rest = [weight for weight in model.parameters() if id(weight) not in known]
    return [[tuple(w.shape) for w in block] for block in inside], [tuple(w.shape) for w in rest]


def _cut(group: Shapes, shard: int) -> int:
    """Numbers of a group on one rank: first dims are divided, and rounded up."""
    return sum(-(-shape[0] // shard) * math.prod(shape[1:]) for shape in group)
