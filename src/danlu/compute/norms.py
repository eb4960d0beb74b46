"""Norms layer by layer, of gradients or weights, whatever layout they have."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard


def layer_of(name: str) -> str:
    """blocks.3.mlp.up.weight -> blocks.3; embed.weight -> embed; heads.language.weight -> heads.language"""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] in ("blocks", "heads") and len(parts) > 2 else parts[0]


def layer_norms(tensors: Mapping[str, Tensor | None]) -> dict[str, float]:
    """The norm of each layer's tensors together, over all ranks, the same on each of them; by the layer's name.

    A layer of which no tensor is there (no gradient came) has norm 0. Sums of squares are taken where the tensors lie
    and added up over ranks once, all layers together.
    """
    layers = list(dict.fromkeys(layer_of(name) for name in tensors))
    there = {name: tensor.detach() for name, tensor in tensors.items() if tensor is not None}
    layouts: dict[tuple[DeviceMesh, tuple[Placement, ...]] | None, list[str]] = {}
    for name, tensor in there.items():
        layout = (tensor.device_mesh, _partial(tensor)) if isinstance(tensor, DTensor) else None
        layouts.setdefault(layout, []).append(name)
    squares = torch.zeros(len(layers), dtype=torch.float64)
    for layout, names in layouts.items():
        locals_ = [t.to_local() if isinstance(t, DTensor) else t for t in (there[name] for name in names)]
        norms = torch.stack(list(torch._foreach_norm(locals_, 2, dtype=_wide(locals_)))).square()
        places = torch.tensor([layers.index(layer_of(name)) for name in names], device=norms.device)
        sums = torch.zeros(len(layers), dtype=norms.dtype, device=norms.device).index_add_(0, places, norms)
        if layout is not None:
            sums = DTensor.from_local(sums, layout[0], layout[1], run_check=False).full_tensor()
        squares += sums.cpu().double()
    return dict(zip(layers, squares.sqrt().tolist()))


def _partial(tensor: DTensor) -> tuple[Placement, ...]:
    """How the sums of squares of a tensor's parts lie: to be added over ranks that hold parts, alike on copies."""
    return tuple(Partial() if isinstance(placement, Shard) else Replicate() for placement in tensor.placements)


def _wide(tensors: list[Tensor]) -> torch.dtype:
    """At least fp32."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
