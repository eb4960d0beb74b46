"""Weights cut over ranks, or copied, by FSDP2; and which slice of which tensor a rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from danlu.compute.traffic import Gather, Reduction
from danlu.compute.zero import Shards, Zero


def shard(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    *,
    mesh: DeviceMesh,
    weights: torch.dtype,
    zero: Zero = 3,
    offload: OffloadPolicy | None = None,
) -> Shards:
    """Each block, and what is left of the model, is gathered when it runs and its gradient summed when it has run.

    mesh: (replicate, shard); weights: what they will be stored in; zero: how long what is gathered stays, see `zero`;
    offload: where the cut weights and their gradients are kept, if not on the device.
    Gradients are reduced in at least fp32, whatever weights and products are. They are SUMMED over ranks, never
    averaged: the loss is already divided by the whole batch's count. gloo has no premultiplied or averaging
    reduction, so the plain sum is forced.
    """
    groups = [*blocks, model]
    within = mesh["shard"] if mesh.size(0) == 1 else mesh  # one replica has nothing to sum with others
    wide = torch.promote_types(weights, torch.float32)
    precision = MixedPrecisionPolicy(reduce_dtype=wide)
    reshard = None if zero == 3 else False  # None: after each forward, but for the model's own weights
    for group in groups:
        fully_shard(
            group,
            mesh=within,
            mp_policy=precision,
            reshard_after_forward=reshard,
            offload_policy=offload or OffloadPolicy(),
        )
    sharded = [cast(FSDPModule, group) for group in groups]
    for module in sharded:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    # A sum that is to be cast to what weights are stored in must be there when the reduction is called.
    beside = mesh.device_type == "cpu" and mesh.size(1) > 1 and weights == wide
    reduction = _beside(sharded) if beside else None
    return Shards(model, zero=zero, replicate=mesh.size(0), reduction=reduction)


def _beside(groups: Sequence[FSDPModule]) -> Reduction:
    """Collectives run beside the computation: each block's gather beside the block before it."""
    gather, reduction = Gather(), Reduction()
    for group in groups:
        group.set_custom_all_gather(gather)
        group.set_custom_reduce_scatter(reduction)
    blocks = groups[:-1]
    for group, following in zip((groups[-1], *blocks), blocks):
        group.set_modules_to_forward_prefetch([following])
    return reduction


def materialise(model: nn.Module, *, device: torch.device, dtype: torch.dtype) -> None:
    """Every parameter has memory on the device, of this dtype and without values; what was one parameter stays one.

    `Module.to_empty` would give a tied weight two memories.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter not in made:
                empty = torch.empty_like(parameter, device=device, dtype=dtype)
                made[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            module.register_parameter(name, made[parameter])


@dataclass(frozen=True, slots=True)
class Slice:
    """What this rank holds of a whole tensor: `local` stands at `offset` in a tensor of `shape`.

    first: whether this rank is the first that holds it, so that what is copied on many ranks is saved once.
    """

    local: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    first: bool


def held(tensor: Tensor, *, rank: int) -> Slice:
    """This rank's slice of a tensor; a plain tensor is held whole by every rank."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return Slice(tensor, tuple(tensor.shape), (0,) * tensor.dim(), rank == 0)
    mesh = tensor.device_mesh
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    where: Sequence[int] = mesh.get_coordinate() or ()
    first = all(at == 0 for at, placement in zip(where, tensor.placements) if isinstance(placement, Replicate))
    return Slice(tensor.to_local(), tuple(tensor.shape), tuple(offset), first)
