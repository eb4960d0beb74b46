"""The compute layer: what a step may ask of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from danlu.compute import graphs
from danlu.compute.zero import Shards
from danlu.core.batch import Batch
from danlu.core.contracts import Head, Output
from danlu.core.terms import Terms
from danlu.core.world import World
from danlu.models.stack import Trunk

Loss = Callable[[Output, Batch], tuple[Tensor, Terms]]
Upstream = Callable[[Tensor], Tensor | None]


class ComputeLayer:
    """Runs micro-batches where their weights are, and adds up over ranks what must be added up.

    upstream: the gradient that each backward begins with, asked for with the loss (memory's scale of it); None: 1.
    shards: the model cut over ranks; None where it is whole. graphed: blocks are recorded as CUDA graphs.
    noted: what is to be told of the compiled blocks; whoever tells it takes it away.
    """

    def __init__(
        self,
        model: Trunk,
        *,
        world: World,
        device: torch.device,
        upstream: Upstream = lambda total: None,
        shards: Shards | None = None,
        graphed: bool = False,
        noted: list[str] | None = None,
    ) -> None:
        self.model = model
        self.shards, self.graphed = shards, graphed
        self.noted: list[str] = [] if noted is None else noted
        self.world = world
        self.device = device
        self.upstream = upstream
        self.heads = cast(Mapping[str, Head], model.heads)  # a ModuleDict: a mapping in all but its type

    def forward(self, batch: Batch) -> Output:
        """What the model says of a batch, under any layout."""
        hidden = self.model(batch.tokens, batch.positions, batch.documents, packed=batch.packed)
        return Output(hidden=hidden, heads=self.heads)

    def forward_backward(self, micros: Sequence[Batch], loss: Loss, *, first_alone: bool = False) -> Iterator[Terms]:
        """Each micro-batch has run forward and backward; gives its terms, and leaves gradients on the weights.

        Where weights are cut over ranks, they are gathered and their gradients reduced on the way (see `zero`).
        first_alone: when the terms of the first are given, its gradients alone have arrived from all ranks.
        """
        for index, batch in enumerate(micros):
            if self.shards is not None:
                self.shards.begin(first=index == 0, last=index == len(micros) - 1, alone=first_alone and index == 0)
            if self.graphed:
                graphs.begin()
            total, terms = loss(self.forward(batch), batch)
            # Under autocast even a product that the forward made in fp32 would be made low in the backward.
            with torch.autocast(self.device.type, enabled=False):
                total.backward(self.upstream(total))
            yield terms

    def release(self) -> None:
        """Between updates: only what a rank keeps is held, and may be written to; no gathered weight goes stale."""
        if self.shards is not None:
            self.shards.release()

    def total(self, terms: Terms) -> Terms:
        """The terms summed over all ranks that hold different data."""
        if self.world.size == 1:
            return terms
        names = sorted(terms)
        values = torch.stack([terms[name].to(self.device) for name in names])
        dist.all_reduce(values)
        return Terms(zip(names, values.unbind()))

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """The norm of all gradients together, over all ranks: a 0-d tensor in at least fp32, the same on every rank."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if any(gradient.dtype in (torch.bfloat16, torch.float16) for gradient in gradients):
            each = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
            norm = torch.linalg.vector_norm(torch.stack(each))
        else:
            norm = torch.nn.utils.get_total_norm(gradients)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def agree(self, flag: Tensor) -> bool:
        """Whether it is true on every rank."""
        if self.world.size == 1:
            return bool(flag)
        votes = flag.to(torch.int32)
        dist.all_reduce(votes, op=dist.ReduceOp.MIN)
        return bool(votes)

    def largest(self, value: int) -> int:
        """The largest of the ranks' values."""
        if self.world.size == 1:
            return value
        votes = torch.tensor(value, dtype=torch.int32, device=self.device)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        return int(votes)
