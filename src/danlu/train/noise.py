"""The gradient noise scale is measured within updates: the gradient of a first part, beside that of the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from danlu.core.batch import Batch
from danlu.core.contracts import Output
from danlu.core.terms import Terms
from danlu.train.run import Run

Loss = Callable[[Output, Batch], tuple[Tensor, Terms]]


class Listener:
    """One update, looked at or not: what its first part came to.

    The first part is the first micro-batch of every rank together: its gradient arrives by itself, so that its norm is
    known, and the rest is added to it. Where a rank has one micro-batch, that is run in two halves. It costs a norm,
    two small sums over ranks and, in zero 1 and between replicas, one more reduction of the gradients.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.due = run.noise is not None and run.noise.due(run.step + 1)
        self.part, self.norm = Terms(), 0.0

    def passes(self, micros: Sequence[Batch], loss: Loss) -> Iterator[Terms]:
        """What `compute.forward_backward` gives."""
        compute = self.run.compute
        if not self.due:
            yield from compute.forward_backward(micros, loss)
            return
        parts = halves(micros)
        self.part = compute.total(self.run.objective.count(parts[0]))
        for index, terms in enumerate(compute.forward_backward(parts, loss, first_alone=True)):
            if index == 0:
                scale = self.run.memory.upstream(torch.ones(()))  # of the loss, in fp16
                self.norm = compute.norm(self.run.weights.values()).item() / (1.0 if scale is None else scale.item())
            yield terms

    def facts(self, norm: Tensor, weights: Terms, *, sound: bool) -> dict[str, float]:
        """What there is to report of the update, now that the norm of the whole gradient is known."""
        if self.run.noise is None or not (self.due and sound):
            return {}
        part, whole = (sum(float(weight) for weight in terms.values()) for terms in (self.part, weights))
        if not 0 < part < whole:
            return {}
        small, large = (self.norm * whole / part) ** 2, norm.item() ** 2  # both losses were divided by the whole
        self.run.noise.see(small=small, large=large, part=part, whole=whole)
        return self.run.noise.facts()


def halves(micros: Sequence[Batch]) -> Sequence[Batch]:
    """The micro-batches; one that is alone, and has more than one row, in two halves."""
    if len(micros) > 1 or len(micros[0]) == 1:
        return micros
    [whole] = micros
    middle = (len(whole) + 1) // 2
    return [whole.rows(0, middle), whole.rows(middle, len(whole))]
