"""One tiny recipe in float64 under any plan: its curve of losses and gradient norms, and where its weights end."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from danlu.core.errors import Failure
from danlu.core.world import World
from danlu.recipe.yaml import load
from danlu.train import state
from danlu.train.assemble import build, gather
from danlu.train.run import Run
from danlu.train.step import step

STEPS = 5
RECIPE = """
name: equal
folder: {folder}
max_steps: 5
model: {{kind: llama, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
         intermediate_size: 48, max_position_embeddings: 64}}
data: {{tokenizer: byte, train: [{text}], validation: 0.2, sequence_length: 32, split: line}}
batch: {{global_batch_size: 8, micro_batch_size: 8}}
optimizer: {{learning_rate: 1e-2, max_grad_norm: 0.5, schedule: {{kind: cosine, warmup_steps: 2}}}}
memory: {{precision: fp64}}
"""


@dataclass
class Curve:
    """What each update came to: loss, gradient norm, labels; and afterwards every gradient-moved weight, whole."""

    losses: list[float]
    norms: list[float]
    weights: list[float]
    samples: list[tuple[str, ...]]
    end: dict[str, np.ndarray]

    def distance(self, other: Curve) -> float:
        """The largest relative difference of any number of the two."""
        pairs = [(self.losses, other.losses), (self.norms, other.norms), (self.weights, other.weights)]
        pairs += [(self.end[name], other.end[name]) for name in self.end]
        assert self.end.keys() == other.end.keys()
        return float(np.max([_apart(np.asarray(a), np.asarray(b)) for a, b in pairs]))  # NaN where any is


def write_recipe(folder: Path) -> Path:
    """The recipe, over documents of very uneven lengths: many rows then hold several, and some documents many rows."""
    source = np.random.default_rng(7)
    lines = ["".join(chr(97 + int(c)) for c in source.integers(0, 26, int(n))) for n in source.integers(1, 70, 90)]
    (folder / "lines.txt").write_text("\n".join(lines))
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(folder=folder / "runs", text=folder / "lines.txt"))
    return path


def curve(world: World, recipe: str, overrides: list[str], start: int = 0, keep: str = "") -> Curve:
    """The curve of a plan, here on one of its ranks. `keep` saves after update 2; `start` goes on from there."""
    run, micros = _assemble(world, recipe, overrides)
    if start:
        _come_back(run, Path(keep))
    return _go(run, micros, keep=None if start or not keep else Path(keep))


def mutant(world: World, recipe: str, overrides: list[str]) -> Curve:
    """The common fault: each micro-batch is divided by its own count, and the means are averaged."""
    run, micros = _assemble(world, recipe, overrides)
    whole = run.compute.forward_backward

    def means(batches, loss):
        def own(out, batch):
            terms = run.objective.loss(out, batch) / run.objective.count(batch)
            mean = terms.total() / micros / world.size
            return mean, type(terms)(language=mean.detach())

        return whole(batches, own)

    run.compute.forward_backward = means  # type: ignore[method-assign]
    return _go(run, micros)


def _assemble(world: World, recipe: str, overrides: list[str]) -> tuple[Run, int]:
    torch.use_deterministic_algorithms(True)
    materials = gather(load(recipe, overrides), world=world, device=torch.device("cpu"), announce=lambda text: None)
    return build(materials), materials.micros


def _go(run: Run, micros: int, keep: Path | None = None) -> Curve:
    reports = []
    while run.step < STEPS:
        reports.append(step(run, run.source.take(micros)))
        if keep and run.step == 2:
            _save(run, keep)
    run.source.close()
    return Curve(
        [r.losses.total().item() for r in reports],
        [r.norm.item() for r in reports],
        [sum(w.item() for w in r.weights.values()) for r in reports],
        [r.samples for r in reports],
        {name: _whole(p) for name, p in run.weights.items()},
    )


def _save(run: Run, folder: Path) -> None:
    from danlu.checkpoint.keep import Checkpoint
    from danlu.checkpoint.save import Saver

    world = run.compute.world
    saver = Saver(folder, Checkpoint(), rank=world.rank, world=world.size, attempt="a")
    saver.save(state.snapshot(run, facts={}, metric=None))
    done = saver.finish()
    assert all(not isinstance(outcome, Failure) for outcome in done), done


def _come_back(run: Run, folder: Path) -> None:
    from danlu.checkpoint.load import newest

    found = newest(folder)
    assert found is not None and found.step == 2, json.dumps(str(found))
    state.restore(run, found)


def _whole(parameter: torch.Tensor) -> np.ndarray:
    tensor = parameter.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).double().numpy().copy()


def _apart(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.max(np.abs(a - b) / np.maximum(np.abs(a), 1.0))) if a.size else 0.0
