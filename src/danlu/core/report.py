"""What one step came to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from danlu.core.terms import Terms


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an update must hold to be made, agreed on before it; infinite: anything."""

    loss: float = math.inf
    norm: float = math.inf

    def hold(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Whether the loss and the gradient norm are within them: a 0-d truth value, the same on every rank."""
        return (loss <= self.loss) & (norm <= self.norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One update of the weights, or one that was skipped. Hooks read it; nothing writes it.

    step          updates tried so far, this one included (the first is 1)
    losses        each term of the loss, already divided by its weight over the whole global batch
    weights       what each term was divided by; for language modelling the number of labelled tokens
    norm          gradient norm over all weights, before clipping
    sound         whether the update was made: loss and norm were finite on every rank, and within the run's limits
    learning_rate the rate of this update
    tokens        tokens read by this update on all ranks, padding left out
    samples       ids of the rows of this rank
    seconds       the step; data_seconds: spent waiting for its data, before it
    """

    step: int
    losses: Terms
    weights: Terms
    norm: Tensor
    sound: bool
    learning_rate: float
    tokens: int
    samples: tuple[str, ...]
    seconds: float
    data_seconds: float = 0.0
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """The loss that was trained, as a number."""
        return self.losses.total().item()
