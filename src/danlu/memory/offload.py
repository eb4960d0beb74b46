"""What is kept elsewhere than on the device: which parts, where, and what of it makes no sense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from danlu.memory.places import File, Host, Place
from danlu.memory.plan import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """What leaves the device on this machine, and a sentence for each thing that was asked for and is not done.

    weights      they, their gradients and their optimizer states are on the host, and are updated there
    states       where optimizer states lie between updates: as the weights do, in the host's memory, or in a file
    activations  what the backward needs waits on the host
    """

    weights: bool = False
    states: Literal["beside", "host", "file"] = "beside"
    activations: bool = False
    folder: Path | None = None
    said: tuple[str, ...] = ()

    def policy(self) -> OffloadPolicy:
        """Where FSDP2 keeps what it cuts."""
        return CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if self.weights else OffloadPolicy()

    def told(self) -> tuple[str, ...]:
        """What is kept elsewhere, a sentence each."""
        found = {
            "weights, gradients and optimizer states are kept on the host, and updated there": self.weights,
            "optimizer states lie in the host's memory between updates": self.states == "host",
            f"optimizer states lie in a file in {self.folder} between updates, gone when the run ends; checkpoints "
            "hold them as ever": self.states == "file",
            "activations wait on the host for the backward": self.activations,
        }
        return tuple(sentence for sentence, true in found.items() if true)

    def place(self) -> Place | None:
        """Where optimizer states lie between updates; None: beside their weights."""
        if self.states == "file":
            assert self.folder is not None
            return File(self.folder)
        return Host(pin=True) if self.states == "host" else None


def choose(parts: Sequence[Part], folder: str | None, device: torch.device) -> Offload:
    """What these parts come to on this device. Raises InputError where the folder cannot be written."""
    where = Path(folder) if folder is not None and "optimizer" in parts else None
    if where is not None:
        File(where)  # made and gone again: what it refuses is refused now
    held = (
        (f"memory.offload_folder: {where} lies in memory itself (tmpfs): nothing is gained",)
        if _in_memory(where)
        else ()
    )
    if device.type == "cuda":
        weights = "weights" in parts
        elsewhere: Literal["beside", "host"] = "host" if "optimizer" in parts and not weights else "beside"
        return Offload(
            weights=weights,
            states="file" if where else elsewhere,
            activations="activations" in parts,
            folder=where,
            said=held,
        )
    idle = [part for part in dict.fromkeys(parts) if part != "optimizer" or where is None]
    said = (
        f"memory.offload: on this {device.type} {' and '.join(idle)} are in the host's memory already: nothing is moved"
    )
    return Offload(states="file" if where else "beside", folder=where, said=(said, *held) if idle else held)


def _in_memory(folder: Path | None) -> bool:
    """Whether the folder lies on a file system that is made of memory."""
    if folder is None:
        return False
    here = folder.resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if here.is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype in ("tmpfs", "ramfs") if mounts else False
