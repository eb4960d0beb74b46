"""Which numbers are low and which are not.

Weights, gradients, moments, norms, softmax, the loss and RoPE's phases are fp32 (at least: in fp64 they are fp64);
under bf16 only the matrix products are low. Master weights are therefore always whole, and an update of 1e-3 on a
weight of 1.0, which bf16 would round away, is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from danlu.core.errors import InputError

Name = Literal["auto", "fp32", "bf16", "fp64"]


@dataclass(frozen=True, slots=True)
class Precision:
    """What weights are stored in, and what products are computed in."""

    name: Name
    weights: torch.dtype
    products: torch.dtype


_KNOWN = {
    "fp32": Precision("fp32", torch.float32, torch.float32),
    "bf16": Precision("bf16", torch.float32, torch.bfloat16),
    "fp64": Precision("fp64", torch.float64, torch.float64),
}


def choose(name: Name, device: torch.device) -> Precision:
    """The precision of that name; `auto` is bf16 where the device multiplies it natively, else fp32."""
    native = multiplies_bf16(device)
    if name == "auto":
        return _KNOWN["bf16" if native else "fp32"]
    if name == "bf16" and not native:
        raise InputError(f"memory.precision: bf16 is not native on this {device.type}; fp32 or auto would do")
    if name == "fp64" and device.type == "mps":
        raise InputError("memory.precision: fp64 does not exist on MPS; fp32 or auto would do")
    return _KNOWN[name]


def multiplies_bf16(device: torch.device) -> bool:
    """Whether bf16 products are faster than fp32 ones here, and not emulated."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "mps":
        return torch.backends.mps.is_macos_or_newer(14, 0)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
