"""Whole gradients of the first updates of the tiny recipe under any plan: two faults may cancel in a loss, not here."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from danlu.core.world import World
from danlu.train.assemble import build, gather
from danlu.train.run import Run
from danlu.train.step import step

UPDATES = 3
Gradients = list[dict[str, np.ndarray]]


def gradients(world: World, recipe: str, overrides: list[str], spoil: Callable[[Run], None] | None = None) -> Gradients:
    """Every weight's gradient in each update, whole, before clipping. `spoil` may break the run first."""
    from danlu.recipe.yaml import load

    torch.use_deterministic_algorithms(True)
    materials = gather(load(recipe, overrides), world=world, device=torch.device("cpu"), announce=lambda text: None)
    run = build(materials)
    if spoil is not None:
        spoil(run)
    made: Gradients = []
    norm = run.compute.norm

    def looked(parameters):
        made.append({name: _whole(weight.grad) for name, weight in run.weights.items()})
        return norm(parameters)

    run.compute.norm = looked  # type: ignore[method-assign]
    for _ in range(UPDATES):
        step(run, run.source.take(materials.micros))
    run.source.close()
    return made


def apart(ours: Gradients, theirs: Gradients) -> float:
    """The largest difference of any number, over the largest number of its weight's gradient; NaN where one is."""
    assert [a.keys() for a in ours] == [b.keys() for b in theirs]
    return float(np.max([np.abs(a[n] - b[n]).max() / np.abs(a[n]).max() for a, b in zip(ours, theirs) for n in a]))


def _whole(gradient: Tensor | None) -> np.ndarray:
    assert gradient is not None
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).numpy().copy()
