"""A report as plain numbers, and as the line that metrics.jsonl holds of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from danlu.core.report import Report


@dataclass(frozen=True, slots=True)
class Reading:
    """The numbers of one report on the host: loss, its terms, their weights, the gradient norm."""

    report: Report
    loss: float
    losses: dict[str, float]
    weights: dict[str, float]
    norm: float

    @property
    def step(self) -> int:
        return self.report.step

    @property
    def finite(self) -> bool:
        """Whether loss and norm are; an update that was not made although they are was above its limits."""
        return self.report.sound or (math.isfinite(self.loss) and math.isfinite(self.norm))


def read(report: Report) -> Reading:
    """The report's numbers; from a GPU they come in one transfer."""
    names, weighed = sorted(report.losses), sorted(report.weights)
    tensors = [*(report.losses[n] for n in names), *(report.weights[n] for n in weighed), report.norm]
    if len(names) > 1:
        tensors.append(report.losses.total())
    values = numbers(tensors)
    norm_at = len(names) + len(weighed)
    return Reading(
        report=report,
        loss=math.nan if not names else values[0] if len(names) == 1 else values[-1],
        losses=dict(zip(names, values)),
        weights=dict(zip(weighed, values[len(names) :])),
        norm=values[norm_at],
    )


def numbers(tensors: list[Tensor]) -> list[float]:
    """Each 0-d tensor's value; those of a GPU are fetched together."""
    if all(t.device.type == "cuda" for t in tensors):
        return torch.stack([t.detach().double() for t in tensors]).tolist()
    return [float(t.detach()) for t in tensors]


def line(
    reading: Reading,
    *,
    tokens: int,
    tokens_per_second: float | None,
    mfu: float | None = None,
    memory: int | None = None,
) -> dict[str, object]:
    """What metrics.jsonl holds of a step: every number finite, or left out. ``tokens`` counts from the run's start."""
    report = reading.report
    facts: dict[str, object] = {
        "step": report.step,
        "loss": reading.loss,
        "learning_rate": report.learning_rate,
        "grad_norm": reading.norm,
        "tokens": tokens,
        "tokens_per_second": tokens_per_second,
        "step_seconds": report.seconds,
        "data_seconds": report.data_seconds,
        "sound": report.sound,
        "mfu": mfu,
        "memory_bytes": memory,
    }
    facts |= {f"loss/{name}": value for name, value in reading.losses.items()}
    facts |= {name: value for name, value in report.extra.items() if name not in facts}
    return finite(facts)


def finite(facts: dict[str, object]) -> dict[str, object]:
    """The same facts without what is None or not finite."""
    return {n: v for n, v in facts.items() if v is not None and not (isinstance(v, float) and not math.isfinite(v))}
