"""The memory layer: what a step may ask of it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from danlu.core.batch import Batch
from danlu.memory.precision import Precision


class MemoryLayer:
    """Brings batches to the device, and says how precisely the forward and backward compute."""

    def __init__(self, *, device: torch.device, precision: Precision) -> None:
        self.device = device
        self.precision = precision

    def fetch(self, batch: Batch) -> Batch:
        """The batch where the model is."""
        return batch if self.device.type == "cpu" else batch.to(self.device)

    def policy(self) -> AbstractContextManager[object]:
        """Products run low inside it, where the precision says so; a weight is cast once for all micro-batches."""
        if self.precision.products == self.precision.weights:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.precision.products, cache_enabled=True)
