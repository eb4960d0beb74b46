"""The memory layer: what a step may ask of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from danlu.core.batch import Batch
from danlu.memory.activations import Activations
from danlu.memory.precision import Precision
from danlu.memory.scale import Scale


class MemoryLayer:
    """Brings batches to the device, and says how precisely the forward and backward compute.

    weights: those whose gradients carry the loss's scale, where there is one (in fp16). activations: what autograd
    keeps waits there for the backward; None: on the device.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        precision: Precision,
        weights: Iterable[nn.Parameter] = (),
        scale: Scale | None = None,
        activations: Activations | None = None,
    ) -> None:
        self.device = device
        self.precision = precision
        self.weights = list(weights)
        self.scale = scale
        self.activations = activations

    def fetch(self, batch: Batch) -> Batch:
        """The batch where the model is."""
        return batch if self.device.type == "cpu" else batch.to(self.device)

    @contextmanager
    def policy(self) -> Iterator[None]:
        """Products run low inside it, where the precision says so; a weight is cast once for all micro-batches.

        After it, gradients are those of the loss itself: its scale is taken out of them.
        """
        low = torch.autocast(self.device.type, dtype=self.precision.products) if self.precision.low else nullcontext()
        away = nullcontext() if self.activations is None else self.activations()
        with low, away:
            yield
        if self.scale is not None:
            self.scale.unscale(self.weights)

    def upstream(self, total: Tensor) -> Tensor | None:
        """The gradient that the backward of a loss begins with: the loss's scale; None: 1."""
        return None if self.scale is None else torch.full_like(total, self.scale.value)

    def settle(self, sound: bool) -> dict[str, float]:
        """The next update is prepared, now that all ranks agree on what became of this one; what there is to say of it:
        the `loss_scale` that it was made with, where it had one.
        """
        if self.scale is None:
            return {}
        said = {"loss_scale": self.scale.value}
        self.scale.settle(sound)
        return said

    def state(self) -> dict[str, float]:
        """A few numbers, enough to go on from them."""
        return {} if self.scale is None else self.scale.state()

    def restore(self, state: Mapping[str, float]) -> None:
        """All is as the state says; a scale that a run did not have yet (its precision was another) begins anew."""
        if self.scale is not None and state:
            self.scale.restore(state)
