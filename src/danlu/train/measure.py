"""How good the run's weights are on held-out text, and their average beside them."""

from __future__ import annotations

from danlu.data.source import Held
from danlu.eval.perplexity import evaluate
from danlu.train.run import Run


def measure(run: Run, held: Held) -> tuple[float, dict[str, float]]:
    """The loss over the whole validation set, the same on every rank; and, where there is an average of the weights,
    its loss as `eval_loss_average`. The weights are afterwards what they were.
    """
    loss = _loss(run, held)
    if run.optim.averages is None:
        return loss, {}
    with run.optim.averages.in_place():
        return loss, {"eval_loss_average": _loss(run, held)}


def _loss(run: Run, held: Held) -> float:
    with run.memory.policy():
        found = evaluate(
            lambda batch: run.compute.forward(batch),
            (run.memory.fetch(batch) for batch in held),
            run.objective,
            run.compute.total,
            model=run.compute.model,
            frozen=run.frozen,
        )
    run.compute.release()
    return found.loss
