"""The loss over the whole validation set, and the rule that stops a run which no longer gains from more."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from danlu.core.batch import Batch
from danlu.core.config import setting
from danlu.core.contracts import Objective, Output, Source
from danlu.core.errors import InputError
from danlu.core.terms import Terms


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Stop when the evaluation loss no longer falls."""

    patience: int = setting(5, "evaluations in a row without a gain, after which the run stops", at_least=1)
    min_delta: float = setting(0.0, "how much lower than the best a loss must be to count as a gain", at_least=0)


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """When to evaluate, and when to stop for what it says."""

    eval_steps: int = setting(50, "updates between two evaluations; one more comes at the end", at_least=1)
    early_stopping: EarlyStopping | None = setting(None, "stop when the evaluation loss no longer falls; null: never")
    prompts: list[str] = setting([], "texts that the model goes on with when the run ends, to be read by a person")
    prompt_tokens: int = setting(120, "tokens that each of them is given at most", at_least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What the whole validation set came to, over all ranks.

    loss     the mean over everything that is asked (for language modelling, over tokens): sum of all / count of all
    losses   each term of it
    weights  how much each term weighs: for language modelling the number of labelled tokens
    """

    loss: float
    losses: dict[str, float]
    weights: dict[str, float]

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that is beyond floating point."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def evaluate(
    forward: Callable[[Batch], Output],
    batches: Iterable[Batch],
    objective: Objective,
    total: Callable[[Terms], Terms],
    *,
    model: nn.Module | None = None,
    frozen: Mapping[str, Any] | None = None,
) -> Evaluation:
    """The loss over all batches of all ranks; the model is as it was, also its train mode and its gradients.

    ``forward`` runs under any layout; ``total`` adds Terms over the ranks. Every rank must come with as many batches as
    the others (rows of padding count nothing). Sums are kept in float64, and nothing of a batch outlives it: memory
    does not grow with the set. Errors: InputError where not one label is asked.
    """
    sums, counts = Terms(), Terms()
    with resting(model) if model is not None else nullcontext(), torch.no_grad():
        for batch in batches:
            enriched = objective.enrich(batch, frozen or {})
            counts += _wide(objective.count(enriched))
            sums += _wide(objective.loss(forward(enriched), enriched))
    sums, counts = total(sums), total(counts)
    weights = {name: float(value) for name, value in counts.items()}
    if not any(weight > 0 for weight in weights.values()):
        raise InputError(
            "data.validation holds not one label to evaluate: it is empty, or its documents are too short."
        )
    losses = sums / counts
    return Evaluation(
        loss=float(losses.total()), losses={name: float(value) for name, value in losses.items()}, weights=weights
    )


def sweep(source: Source, *, updates: int, micros: int = 1) -> Iterator[Batch]:
    """Each of this rank's batches of the first ``updates`` global batches, once, from the source's beginning."""
    source.seek({"samples": 0})
    for _ in range(updates):
        yield from source.take(micros)


@contextmanager
def resting(model: nn.Module) -> Iterator[None]:
    """Inside, every part is in evaluation mode; afterwards each is in the mode that it was in, whatever happened."""
    training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


class Stopping:
    """The rule of early stopping. Its state is a few numbers, kept in checkpoints.

    A gain is a loss lower by more than ``min_delta`` than at the last gain, so that many small steps down are one, too.
    """

    def __init__(self, *, patience: int, min_delta: float = 0.0):
        self.patience, self.min_delta = patience, min_delta
        self.best = math.inf  # the lowest loss seen, and its step: whether a gain or not
        self.best_step = 0
        self.mark = math.inf  # the loss at the last gain
        self.waited = 0  # evaluations since then

    def see(self, step: int, loss: float) -> bool:
        """Whether to stop, now that this evaluation is known. A loss that is not finite is no gain."""
        gain = math.isfinite(loss) and loss < self.mark - self.min_delta
        self.mark, self.waited = (loss, 0) if gain else (self.mark, self.waited + 1)
        if math.isfinite(loss) and loss < self.best:
            self.best, self.best_step = loss, step
        return self.waited >= self.patience

    def state(self) -> dict[str, float | int | None]:
        """All that it needs to go on; numbers that JSON can hold."""
        best, mark = (value if math.isfinite(value) else None for value in (self.best, self.mark))
        return {"best": best, "best_step": self.best_step, "mark": mark, "waited": self.waited}

    def restore(self, state: Mapping[str, Any]) -> None:
        """It goes on from a state."""
        self.best, self.mark = (math.inf if state[name] is None else float(state[name]) for name in ("best", "mark"))
        self.best_step, self.waited = int(state["best_step"]), int(state["waited"])


def _wide(terms: Terms) -> Terms:
    """The same values in float64, cut from the graph; in fp32 on devices that know no float64."""

    def wide(value: Tensor) -> Tensor:
        return value.detach().to(torch.float32 if value.device.type == "mps" else torch.float64)

    return Terms({name: wide(value) for name, value in terms.items()})
