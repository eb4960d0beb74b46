"""CUDA graphs: the kernels of a compiled block are recorded once and sent to the device in one call.

Shapes must be fixed, and weights must stay where they are; compiled code that can be recorded is made by torch.compile
itself. Written by its documentation; nothing here ever ran on a GPU of ours.
"""

from __future__ import annotations

from typing import Any

import torch

from danlu.core.errors import InputError

OPTIONS: dict[str, Any] = {"triton.cudagraphs": True}  # what mode="reduce-overhead" adds


def refuse(device: torch.device, *, ranks: int) -> None:
    """Raises InputError where there can be none."""
    if device.type != "cuda":
        raise InputError(f"compile: graphs are CUDA's, and this device is {device.type}; compile: true would do")
    if ranks > 1:
        raise InputError(
            f"compile: graphs need weights that stay where they are, which {ranks} ranks gather anew each time; "
            "compile: true would do"
        )


def begin() -> None:
    """A new forward begins: what recorded graphs gave before may be overwritten."""
    torch.compiler.cudagraph_mark_step_begin()
