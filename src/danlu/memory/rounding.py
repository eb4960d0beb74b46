"""Weights and moments kept in bf16, moved in fp32 and rounded stochastically (Gupta et al. 2015, arXiv:1502.02551).

A number between two neighbours of bf16 becomes the upper one with a probability of its distance from the lower one, so
that on average nothing is lost: an update of 1e-3 on a weight of 1.0, which rounding to the nearest would undo every
time, moves it by a bf16 step every eighth time.

What is drawn is a function of (seed, update, name of the weight, place in the whole weight) alone, so it is the same
under any layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor, nn

from danlu.core.world import local, stream

CHUNK = 2**18  # numbers rounded at a time: few enough to stay in a CPU's cache
CHUNK_DEVICE = 2**26
LOW = 0xFFFF  # the half of an fp32 number that bf16 does not have


@dataclass(frozen=True, slots=True)
class Place:
    """A weight's name, the shape of the whole of it, and where this rank's part begins."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]


class Stochastic:
    """How an optimiser makes an update whose weights and moments are stored in bf16: one weight after the other, each
    in fp32 while it moves, so that no more than one weight is ever held twice.
    """

    def __init__(self, seed: int, places: Mapping[nn.Parameter, Place]) -> None:
        self.seed = seed
        self.places = places

    def __call__(self, optimizer: torch.optim.Optimizer, update: int) -> None:
        """The optimiser has made this update."""
        groups = list(optimizer.param_groups)
        try:
            for group in groups:
                for weight in group["params"]:
                    if weight.grad is not None:
                        self._move(optimizer, group, weight, update)
        finally:
            optimizer.param_groups[:] = groups

    def _move(
        self, optimizer: torch.optim.Optimizer, group: dict[str, object], weight: nn.Parameter, update: int
    ) -> None:
        assert weight.grad is not None
        wide = nn.Parameter(weight.detach().float())
        wide.grad = weight.grad.float()
        state = optimizer.state.pop(weight, {})
        kept = {kind for kind, value in state.items() if _alike(value, weight, weight.dtype)}
        optimizer.state[wide] = {kind: value.float() if kind in kept else value for kind, value in state.items()}
        optimizer.param_groups[:] = [{**group, "params": [wide]}]
        optimizer.step()
        moved, place = optimizer.state.pop(wide), self.places[weight]
        self._store(weight.detach(), wide.detach(), place, update, "weight")
        for kind, value in moved.items():
            if _alike(value, weight, torch.float32):
                stored = state[kind] if kind in kept else torch.empty_like(value, dtype=weight.dtype)
                self._store(stored, value, place, update, kind)
                moved[kind] = stored
        optimizer.state[weight] = moved

    def _store(self, stored: Tensor, exact: Tensor, place: Place, update: int, kind: str) -> None:
        """The stored numbers are the exact ones, rounded."""
        key = stream(self.seed, "rounding", update, place.name, kind)
        round_into(local(stored), local(exact), key=key, shape=place.shape, offset=place.offset)


def round_into(low: Tensor, exact: Tensor, *, key: int, shape: Sequence[int], offset: Sequence[int]) -> None:
    """low (bf16) holds exact (fp32), each number rounded up or down by a draw of (key, its place in the whole).

    Both are the part of a tensor of `shape` that begins at `offset`. A number that bf16 has stays as it is; one that is
    not finite too.
    """
    if not low.numel():
        return
    rows = exact.reshape(exact.shape[0] if exact.dim() else 1, -1)
    into = low.view(rows.shape)
    # Places modulo 2**32: two that lie so far apart may share a draw.
    inner = _places(tuple(shape[1:]), tuple(offset[1:]), tuple(exact.shape[1:]), exact.device).to(torch.int32)
    stride, first = _numel(shape[1:]), offset[0] if offset else 0
    most = max(1, (CHUNK if exact.is_cpu else CHUNK_DEVICE) // rows.shape[1])
    for start in range(0, len(rows), most):
        part = rows[start : start + most]
        begins = (torch.arange(first + start, first + start + len(part), device=exact.device) * stride).to(torch.int32)
        drawn = _mixed(begins[:, None] + inner, key).bitwise_and_(LOW)
        rounded = drawn.add_(part.view(torch.int32)).bitwise_and_(~LOW).view(torch.float32)
        into[start : start + most] = torch.where(part.isfinite(), rounded, part)


def _places(shape: tuple[int, ...], offset: tuple[int, ...], local: tuple[int, ...], device: torch.device) -> Tensor:
    """The flat index in a tensor of `shape` of each number of its part, flat."""
    index = torch.zeros(1, dtype=torch.int64, device=device)
    for size, start, length in zip(shape, offset, local):
        index = (index[:, None] * size + torch.arange(start, start + length, device=device)).flatten()
    return index


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _mixed(x: Tensor, key: int) -> Tensor:
    """Each 32-bit number turned into one that looks drawn, in place: two rounds of MurmurHash3's finaliser, keyed."""
    for word in (key & 0xFFFFFFFF, key >> 32):
        x.add_(_signed(word))
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            x.bitwise_xor_((x >> shift).bitwise_and_((1 << (32 - shift)) - 1))
            x.mul_(_signed(factor))
        x.bitwise_xor_((x >> 16).bitwise_and_(LOW))
    return x


def _signed(word: int) -> int:
    """The same 32 bits as a number that int32 has."""
    return word - (1 << 32) if word >= 1 << 31 else word


def _alike(value: object, weight: Tensor, dtype: torch.dtype) -> TypeGuard[Tensor]:
    """Whether it is a number for each number of the weight, stored so."""
    return isinstance(value, Tensor) and value.dtype == dtype and value.shape == weight.shape
