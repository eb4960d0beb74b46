"""What moves weights: this rank's rows of each, with its kept state beside them; and sums over the rows of other ranks.

Every optimiser here is a function of plain tensors, so that it runs alike on whole weights and on cut ones, without a
dispatch for each. What needs a whole weight (a norm, a mean, a matrix) asks for it here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from danlu.core.world import local
from danlu.optim.common import Common, Kept
from danlu.optim.groups import Group

# Bytes of weights that are moved at a time. Several passes over so little find it in a processor's cache; an
# accelerator wants few launches instead.
AT_ONCE_CPU, AT_ONCE_ELSEWHERE = 1 << 21, 1 << 28


@dataclass(frozen=True, slots=True)
class Moving:
    """One weight that is about to move: what this rank holds of it, of its gradient and of its state.

    whole: the weight as the model has it, cut over ranks or not.
    """

    weight: Tensor
    gradient: Tensor
    state: dict[str, Tensor]
    whole: Tensor


Move = Callable[[Sequence[Moving], dict[str, Any]], None]


class Own(torch.optim.Optimizer):
    """torch's optimiser outside (groups, state, zero_grad); inside, `move` gets the weights of each group that have a
    gradient, and the group (`lr`, `weight_decay`, `role`). State is made when a weight first moves.
    """

    def __init__(self, settings: Common, groups: Sequence[Group], move: Move) -> None:
        super().__init__(settings.described(groups), {"lr": settings.learning_rate})
        self.settings = settings
        self.move = move

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Every weight that has a gradient has moved."""
        for group in self.param_groups:
            moving = [self._moving(weight, group["role"]) for weight in group["params"] if weight.grad is not None]
            if moving:
                self.move(moving, group)

    def _moving(self, weight: Tensor, role: str) -> Moving:
        state = self.state[weight]
        if not state:
            for kind, kept in self.settings.states(weight.shape, dtype=weight.dtype, role=role).items():
                state[kind] = laid(_zeros(kept, weight), kept, weight)
        assert weight.grad is not None
        return Moving(
            local(weight.detach()), local(weight.grad), {kind: local(value) for kind, value in state.items()}, weight
        )


def part(
    kept: Kept, shape: Sequence[int], here: Sequence[int], offset: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which part of a kept tensor a rank holds, (sizes, offset), that holds `here` from `offset` on of a weight.

    Each dim that is as long as the weight's is cut as the weight's is; the others, and what is whole, are not cut.
    """
    if kept.whole or len(kept.shape) != len(shape):
        return kept.shape, (0,) * len(kept.shape)
    cut = [long == weight for long, weight in zip(kept.shape, shape)]
    sizes = tuple(here[dim] if cut[dim] else long for dim, long in enumerate(kept.shape))
    return sizes, tuple(offset[dim] if cut[dim] else 0 for dim in range(len(cut)))


def laid(value: Tensor, kept: Kept, weight: Tensor) -> Tensor:
    """This rank's part of a kept tensor, laid out over the ranks as its weight is, and on the weight's device."""
    if isinstance(value, DTensor):
        return value
    value = value if kept.host else value.to(local(weight).device)
    if not isinstance(weight, DTensor) or kept.whole or not kept.shape:
        return value
    strides = tuple(math.prod(kept.shape[dim + 1 :]) for dim in range(len(kept.shape)))
    return spread(value, weight, shape=torch.Size(kept.shape), stride=strides)


def spread(value: Tensor, like: DTensor, *, shape: torch.Size, stride: tuple[int, ...]) -> DTensor:
    """The very tensor as this rank's part of one of this shape, cut over the ranks as another is.

    `DTensor.from_local` would move it to the device of the ranks' mesh, where what is kept on the host is not.
    """
    hollow = DTensor.from_local(
        value.to("meta"), like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride
    )
    return DTensor(value, hollow._spec, requires_grad=False)


def slices(moving: Sequence[Moving]) -> Iterator[Moving]:
    """The weights, flat, and on a processor a slice of them after another: for what moves each number by itself."""
    for one in moving:
        flat = one.weight.view(-1), one.gradient.reshape(-1), *(value.view(-1) for value in one.state.values())
        most = AT_ONCE_CPU // one.weight.dtype.itemsize if one.weight.device.type == "cpu" else flat[0].numel()
        for weight, gradient, *states in zip(*(tensor.split(max(1, most)) for tensor in flat)):
            yield Moving(weight, gradient, dict(zip(one.state, states)), weight)


def portions(moving: Iterable[Moving]) -> Iterator[list[Moving]]:
    """The weights, a few at a time, in their order; the same cut on every rank."""
    some: list[Moving] = []
    filled = 0
    for one in moving:
        size = one.whole.numel() * one.whole.dtype.itemsize
        limit = AT_ONCE_CPU if one.weight.device.type == "cpu" else AT_ONCE_ELSEWHERE
        if some and filled + size > limit:
            yield some
            some, filled = [], 0
        some.append(one)
        filled += size
    if some:
        yield some


def total(sums: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    """Each sum over this rank's rows of a weight, added up over the ranks that hold its other rows.

    One message for all that are cut alike.
    """
    alike: dict[tuple[Any, ...], list[int]] = {}
    for index, weight in enumerate(weights):
        if isinstance(weight, DTensor):
            axes = tuple(axis for axis, how in enumerate(weight.placements) if isinstance(how, Shard))
            alike.setdefault((weight.device_mesh, axes), []).append(index)
    found = list(sums)
    for (mesh, axes), indices in alike.items():
        axes = tuple(axis for axis in axes if mesh.size(axis) > 1)
        if not axes:
            continue
        flat = torch.cat([sums[index].reshape(-1) for index in indices])
        for axis in axes:
            dist.all_reduce(flat, group=mesh.get_group(axis))
        for index, piece in zip(indices, flat.split([sums[index].numel() for index in indices])):
            found[index] = piece.view_as(sums[index])
    return found


def _zeros(kept: Kept, weight: Tensor) -> Tensor:
    here = local(weight)
    sizes, _ = part(kept, weight.shape, here.shape, (0,) * here.dim())
    return torch.zeros(sizes, dtype=kept.dtype, device="cpu" if kept.host else here.device)
