"""danlu's own step on the benchmark's decoder: the same `train/step.py` that a recipe runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from common import Meter, options, tokens

chosen = options()

import torch
from decoder import batch, family

from danlu.compute.compile import Compiled
from danlu.compute.layer import ComputeLayer
from danlu.core import heap
from danlu.core.batch import Batch
from danlu.core.world import World
from danlu.memory.layer import MemoryLayer
from danlu.memory.precision import choose
from danlu.models.start import fill
from danlu.objectives.causal import Causal
from danlu.optim.adamw import AdamW
from danlu.optim.layer import OptimLayer
from danlu.optim.schedule import Constant
from danlu.train.run import Run
from danlu.train.step import step


class Rows:
    """The benchmark's tokens, a batch an update."""

    def __init__(self, data: torch.Tensor) -> None:
        self.batches = iter(data.split(chosen.mb))
        self.tokens, self.waited = chosen.mb * chosen.seq, 0.0

    def take(self, micros: int) -> list[Batch]:
        return [batch(next(self.batches))]

    def state(self) -> dict[str, int]:
        return {}

    def seek(self, state: Mapping[str, int]) -> None: ...

    def close(self) -> None: ...


def main() -> None:
    torch.set_num_threads(chosen.threads)
    heap.keep()
    device = torch.device("cpu")
    model = family(chosen).build()
    if chosen.compile:
        Compiled(model.blocks.values(), say=lambda text: print(text, file=sys.stderr))
    fill(model, 0)
    named = dict(model.named_parameters())
    optimizer = AdamW(learning_rate=3e-4, weight_decay=0.01, betas=(0.9, 0.999), schedule=Constant())
    run = Run(
        compute=ComputeLayer(model, world=World(), device=device),
        memory=MemoryLayer(device=device, precision=choose(chosen.dtype, device)),
        optim=OptimLayer(optimizer, named.items(), total=chosen.warm + chosen.steps),
        objective=Causal(),
        source=Rows(tokens(chosen, chosen.mb * (chosen.warm + chosen.steps))),
        weights=named,
    )
    meter = Meter("danlu, compiled" if chosen.compile else "danlu", chosen)
    for _ in range(chosen.warm + chosen.steps):
        meter.tick(step(run, run.source.take(1)).loss)
    meter.report()


main()
