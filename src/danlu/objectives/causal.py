"""Causal language modelling: predict the next token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from danlu.core.batch import IGNORE, Batch
from danlu.core.contracts import Output
from danlu.core.terms import Terms


@dataclass(frozen=True, kw_only=True)
class Causal:
    """The sum of -log p(label) over labelled tokens; the loss is its mean over the whole global batch.

    Fine-tuning on instructions is this with masked labels: labels are made where batches are made.
    """

    kind: Literal["causal"] = "causal"

    def enrich(self, batch: Batch, frozen: Mapping[str, Any]) -> Batch:
        """Nothing is needed beyond the batch."""
        return batch

    def count(self, batch: Batch) -> Terms:
        """Labelled tokens."""
        return Terms(language=(batch.labels != IGNORE).sum())

    def loss(self, out: Output, batch: Batch) -> Terms:
        """Summed negative log-likelihood, in nats."""
        return Terms(language=out.heads["language"].nll(out.hidden, batch.labels))
