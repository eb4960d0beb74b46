"""Reports as a run would give them."""

from __future__ import annotations

import math

import torch

from danlu.core.report import Report
from danlu.core.terms import Terms


def report(
    step: int,
    *,
    loss: float = 2.0,
    norm: float = 1.0,
    labels: float = 64,
    tokens: int = 64,
    seconds: float = 0.1,
    data_seconds: float = 0.0,
    rate: float = 1e-3,
    samples: tuple[str, ...] = ("a:0", "a:1"),
    **terms: float,
) -> Report:
    losses = Terms({name: torch.tensor(value) for name, value in (terms or {"language": loss}).items()})
    return Report(
        step=step,
        losses=losses,
        weights=Terms({name: torch.tensor(labels) for name in losses}),
        norm=torch.tensor(norm),
        sound=math.isfinite(float(losses.total())) and math.isfinite(norm),
        learning_rate=rate,
        tokens=tokens,
        samples=samples,
        seconds=seconds,
        data_seconds=data_seconds,
    )


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds
