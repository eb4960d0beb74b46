"""The state of one run: what a step reads and moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from danlu.compute.layer import ComputeLayer
from danlu.core.contracts import Objective, Source
from danlu.core.report import Limits
from danlu.memory.layer import MemoryLayer
from danlu.monitor.noise import NoiseScale
from danlu.optim.layer import OptimLayer


@dataclass(slots=True, kw_only=True)
class Run:
    """A model, its three layers, what is asked of it, where batches come from, and how far it has come.

    weights  every weight by name, each once: a tied one has one name
    frozen   models that are asked but not trained (a reference, a teacher)
    step     updates tried, skipped ones included
    tokens   tokens read, over all ranks, padding left out
    skipped  updates that were not made because a number was not finite, or above the limits
    noise    what is known of the gradient's noise, where that is measured
    limits   what the loss and gradient norm of the next update must hold for it to be made
    look     what is looked at while gradients are there: facts for the report, nothing where none is due
    """

    compute: ComputeLayer
    memory: MemoryLayer
    optim: OptimLayer
    objective: Objective
    source: Source
    weights: Mapping[str, nn.Parameter]
    frozen: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0
    tokens: int = 0
    skipped: int = 0
    noise: NoiseScale | None = None
    limits: Limits = Limits()
    look: Callable[[], Mapping[str, float]] = dict

    def advance(self, *, sound: bool, tokens: int) -> None:
        """One more update was tried."""
        self.step += 1
        self.tokens += tokens
        self.skipped += not sound
