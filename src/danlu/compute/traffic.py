"""Gathers and reductions between processes on CPUs that run beside the computation, on gloo's own threads.

FSDP2 overlaps by CUDA streams, and a CPU has none: there each collective would be begun, and waited for on the spot.
So the two collectives are given to it by its own interface for them (`set_custom_all_gather` and
`set_custom_reduce_scatter`): begun at once, waited for where their result is needed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.profiler import record_function

FEW = 8  # ranks
FLYING = 1  # reductions under way when a backward goes on: that of block n while block n - 1 computes


class Gather(AllGather):
    """Gathers whose end FSDP2 waits for when it copies the weights out.

    Each rank sends its part to all others: half the processor time of gloo's own gather, which copies what it sends and
    what it gets. Among more than FEW ranks the number of messages would weigh more.
    """

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Room for the whole of a group's weights."""
        return _room(size, dtype, device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """The gather is under way; the work given back is done when the output holds every rank's part.

        `input_tensor` is this rank's part of the output already, as FSDP2 lays it there.
        """
        if group.size() > FEW:
            return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=True)
        parts = output_tensor.view(group.size(), -1)
        assert parts[group.rank()].data_ptr() == input_tensor.data_ptr()
        return _All([dist.broadcast(part, group=group, group_src=n, async_op=True) for n, part in enumerate(parts)])


class _All(dist.Work):
    """Several works as one."""

    def __init__(self, works: Sequence[dist.Work | None]) -> None:
        super().__init__()
        self.works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Each of them is done."""
        for work in self.works:
            assert work is not None
            work.wait()
        return True


class _Flight(NamedTuple):
    work: dist.Work
    parts: Tensor  # [ranks, n]: what each rank has for this one
    sum: Tensor  # [n]


class Reduction(ReduceScatter):
    """Sums of gradients, scattered: each rank gets the others' parts for it, and adds them up in the ranks' order.

    gloo's own reduce-scatter reduces everything for everyone, twice the bytes. A sum is there once its reduction has
    landed: when FLYING others are under way, at `land`, and at the end of the backward in any case.
    hurry: every reduction lands at once, since what is made of it is needed on the spot (added to what is held
    already, or to be reduced over replicas too).
    """

    def __init__(self) -> None:
        self.hurry = False
        self._flying: deque[_Flight] = deque()

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Room for a group's gradients, whole (to send) or this rank's part (to keep)."""
        return _room(size, dtype, device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """The reduction is under way. To be called in a backward, as FSDP2 does."""
        assert op == dist.ReduceOp.SUM, "gradients are summed, never averaged"
        # As FSDP2 does for its own end: whoever runs the backward need not know of it.
        Variable._execution_engine.queue_callback(self.land)
        parts = torch.empty_like(input_tensor)
        work = dist.all_to_all_single(parts, input_tensor, group=group, async_op=True)
        assert work is not None
        self._flying.append(_Flight(work, parts.view(group.size(), -1), output_tensor))
        self.land(leave=0 if self.hurry else FLYING)
        return None

    def land(self, *, leave: int = 0) -> None:
        """The sums are in their place, but for the newest `leave`."""
        while len(self._flying) > leave:
            flight = self._flying.popleft()
            with record_function("danlu::land"):
                flight.work.wait()
                torch.sum(flight.parts, 0, out=flight.sum)


def _room(size: Sequence[int | torch.SymInt], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(math.prod(int(n) for n in size), dtype=dtype, device=device)
