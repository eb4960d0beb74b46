"""One update of the weights. The three layers meet here, and only here."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from danlu.core.batch import Batch
from danlu.core.contracts import Output
from danlu.core.report import Report
from danlu.core.terms import Terms
from danlu.train.noise import Listener
from danlu.train.run import Run


def step(run: Run, batches: Sequence[Batch]) -> Report:
    """Move the weights once: forward -> loss -> backward -> update."""
    compute, memory, optim, objective = run.compute, run.memory, run.optim, run.objective
    start = time.perf_counter()

    # Weigh the whole step before its first forward. Every micro-batch on every rank is then divided by the same
    # totals, so cutting the batch differently changes nothing. (Tokens are counted on the way, for the log.)
    micros = [objective.enrich(memory.fetch(batch), run.frozen) for batch in batches]
    counted = Terms(tokens=torch.tensor(run.source.tokens))
    weights = compute.total(sum((objective.count(micro) for micro in micros), counted))
    tokens = weights.pop("tokens")

    def loss(out: Output, batch: Batch) -> tuple[Tensor, Terms]:
        terms = objective.loss(out, batch) / weights
        return terms.total(), terms.detach()

    # Forward, loss, backward. Compute decides when and where each micro-batch runs; memory decides what is kept of
    # it, where, and how precisely. The zeros speak for a rank that computes no loss.
    listener = Listener(run)  # now and then the first micro-batch's gradient is looked at by itself
    with memory.policy():
        losses = compute.total(sum(listener.passes(micros, loss), weights.zeros()))

    # Update, unless some rank met a number that is not one, or they are far above what they use to be.
    norm = compute.norm(run.weights.values())
    finite = compute.agree(losses.total().isfinite() & norm.isfinite())
    sound = finite and bool(run.limits.hold(losses.total(), norm))
    said = {**memory.settle(finite), **listener.facts(norm, weights, sound=sound), **run.look()}
    if sound:
        optim.clip(norm)
        optim.step(run.step + 1)
    optim.zero()

    run.advance(sound=sound, tokens=int(tokens))
    return Report(
        step=run.step,
        losses=losses,
        weights=weights,
        norm=norm,
        sound=sound,
        learning_rate=optim.rate(run.step),
        tokens=int(tokens),
        samples=tuple(sample for batch in batches for sample in batch.samples),
        seconds=time.perf_counter() - start,
        extra=said,
    )
