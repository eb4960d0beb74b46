"""Initial weights, by role, depth and parameter name.

Matrices are normal with the family's initializer_range; those that write into the residual stream (role "row") are
divided by sqrt(2 * layers), the number of writes (GPT-2, Radford et al. 2019, section 2.3: "we scale the weights of
residual layers at initialization by a factor of 1/sqrt(N) where N is the number of residual layers"). Norms are one,
biases zero.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from danlu.core.world import generator
from danlu.models.norm import Norm
from danlu.models.stack import Trunk, plain


def fill(model: Trunk, seed: int) -> None:
    """Every parameter holds its first value: a pure function of (seed, its name), whatever the layout or the order.

    Each is drawn whole in fp32 on the CPU; a rank keeps its part, without communication.
    """
    spread = deviations(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            name = plain(name)
            put(parameter, first(seed, name, parameter.shape, spread[name]))


def first(seed: int, name: str, shape: torch.Size, deviation: float) -> Tensor:
    """The first value of one parameter, whole, in fp32: normal; without deviation zero (a bias) or one (a norm)."""
    if name.endswith("bias"):
        return torch.zeros(shape)
    if deviation == 0:
        return torch.ones(shape)
    return torch.empty(shape).normal_(std=deviation, generator=generator(seed, name))


def deviations(model: Trunk) -> dict[str, float]:
    """Standard deviation of each parameter's first value; 0 for norms and biases."""
    shape = model.shape
    usual, residual = shape.initializer_range, shape.initializer_range / math.sqrt(2 * shape.layers)
    spread: dict[str, float] = {}
    for path, module in model.named_modules():
        roles = getattr(module, "roles", {})
        for name, _ in module.named_parameters(prefix=path, recurse=False):
            constant = isinstance(module, Norm) or name.endswith("bias")
            spread[plain(name)] = 0.0 if constant else spread.get(plain(name), usual)
        for part, role in roles.items():
            if role == "row":
                spread[plain(f"{path}.{part}.weight")] = residual
    return spread


def put(parameter: Tensor | nn.Parameter, whole: Tensor) -> None:
    """The parameter holds the tensor, cast to its dtype; a sharded one this rank's part of it."""
    with torch.no_grad():
        if not isinstance(parameter, DTensor):
            parameter.copy_(whole)
            return
        whole = whole.to(device=parameter.to_local().device, dtype=parameter.dtype)
        # src_data_rank None: every rank has the same whole tensor and cuts its own part, nothing is sent
        part = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(part.to_local())
