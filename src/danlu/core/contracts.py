"""What rooms ask of each other: protocols, and the few plain types they pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

from torch import Tensor

from danlu.core.batch import Batch
from danlu.core.report import Report
from danlu.core.terms import Terms


class Head(Protocol):
    """The end of a model: scores labels in chunks, so that whole logits need never exist."""

    def nll(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Summed -log p of the labels that are not IGNORE: a 0-d tensor in at least fp32, with its gradient."""
        ...

    def logp(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """log p of each label, [B, S], in at least fp32; 0 where the label is IGNORE."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Whole logits, [..., V]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a forward gives: the trunk's last hidden states [B, S, D], and the heads that can score them.

    heads["language"] scores tokens; aux holds terms that the trunk itself asks (a router's balance).
    """

    hidden: Tensor
    heads: Mapping[str, Head]
    aux: Terms = field(default_factory=Terms)


class Objective(Protocol):
    """What is asked of the model. Pure: knows no model, no rank, no optimiser."""

    def enrich(self, batch: Batch, frozen: Mapping[str, Any]) -> Batch:
        """The batch with facts that need no gradient (reference log-probabilities, a teacher's)."""
        ...

    def count(self, batch: Batch) -> Terms:
        """How much each term weighs, BEFORE the forward."""
        ...

    def loss(self, out: Output, batch: Batch) -> Terms:
        """The SUM of each term, after it."""
        ...


class Source(Protocol):
    """Where batches come from. Its whole state is a few integers, independent of ranks and workers.

    tokens   tokens in this rank's share of the last batch, padding left out
    waited   seconds that the last batch was waited for
    """

    @property
    def tokens(self) -> int: ...
    @property
    def waited(self) -> float: ...

    def take(self, micros: int) -> list[Batch]:
        """This rank's share of the next global batch, cut into micro-batches; moves the position on by one update.

        micros: micro-batches of a full update; a smaller one has fewer, or a smaller last one.
        """
        ...

    def state(self) -> dict[str, int]:
        """The position, enough to go on from it."""
        ...

    def seek(self, state: Mapping[str, int]) -> None:
        """Go to a position, at once: nothing is read and thrown away."""
        ...

    def pass_over(self, state: Mapping[str, int]) -> None:
        """Go to a later position: what lies between is not learned from, and the end comes as much later."""
        ...

    def close(self) -> None:
        """Nothing is read ahead any more."""
        ...


class Signal(IntEnum):
    """What a hook answers; ranks agree by the largest.

    STOP: the run is not healthy. LEAVE: told to go by a signal from outside; save and go.
    """

    GO = 0
    SAVE = 1
    ROLLBACK = 2
    STOP = 3
    LEAVE = 4


class Hook(Protocol):
    """Reads a Report after each step; never touches the run."""

    def __call__(self, report: Report) -> Signal: ...


class Cache(Protocol):
    """Keys and values of the tokens already read, layer by layer, for generation."""

    @property
    def length(self) -> int:
        """Tokens held (the same for every layer between two forwards)."""
        ...

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add [B, heads, s, head_dim]; give back all that is held for this layer, the new ones last."""
        ...
