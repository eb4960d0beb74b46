"""Weights cut over ranks, or copied, by FSDP2."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard


def shard(model: nn.Module, blocks: Iterable[nn.Module], *, mesh: DeviceMesh) -> None:
    """Each block, and what is left of the model, is gathered when it runs and its gradient summed when it has run.

    Gradients are SUMMED over ranks, never averaged: the loss is already divided by the whole batch's count. gloo has
    no premultiplied or averaging reduction, so the plain sum is forced.
    """
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
