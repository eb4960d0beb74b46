"""Every optimiser moves cut and copied weights as it moves whole ones: whole training, in float64, to 1e-12; and comes
back from a checkpoint as it left, on the same layout to the bit, on another to 1e-12.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from danlu.core.world import World
from danlu.optim.sharing import Exchange
from danlu.recipe.yaml import load
from danlu.train.assemble import build, gather
from danlu.train.step import step
from tests.equal.curves import STEPS, Curve, curve, write_recipe
from tests.ranks import Ranks

EXACT = 1e-12
WIDE = ["model.hidden_size=64", "model.intermediate_size=96"]  # with matrices large enough for 8-bit moments
KINDS = {
    "adamw": [],
    "lamb": ["optimizer.kind=lamb", "optimizer.learning_rate=3e-2"],
    "lion": ["optimizer.kind=lion", "optimizer.learning_rate=1e-3"],
    "adafactor": ["optimizer.kind=adafactor", "optimizer.learning_rate=3e-2", "optimizer.weight_decay=0.1"],
    "muon": ["optimizer.kind=muon", "optimizer.learning_rate=3e-2"],
    "sgd": ["optimizer.kind=sgd", "optimizer.learning_rate=1", "optimizer.nesterov=true"],
    "plain sgd": ["optimizer.kind=sgd", "optimizer.learning_rate=1", "optimizer.momentum=0"],
    "adamw8bit": [*WIDE, "optimizer.kind=adamw8bit", "optimizer.full_embedding=false"],
}
MICRO = "batch.micro_batch_size=2"
LAYOUTS = {
    "shard": ["parallel.shard=2", MICRO],
    "replicate": ["parallel.replicate=2", "parallel.shard=1", MICRO],
}
HYBRID = ["parallel.replicate=2", "parallel.shard=2", MICRO]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_recipe(tmp_path_factory.mktemp("equal")))


@pytest.fixture(scope="module")
def alone(recipe: str) -> dict[str, Curve]:
    """Each optimiser on one process. They must differ, and learn."""
    made = {kind: curve(World(), recipe, [*given, MICRO]) for kind, given in KINDS.items()}
    assert all(one.losses[-1] < one.losses[0] for one in made.values())
    assert len({one.losses[-1] for one in made.values()}) == len(made)
    return made


def on_each_layout(world: World, recipe: str, kind: str) -> dict[str, Curve]:
    return {name: curve(world, recipe, [*KINDS[kind], *layout]) for name, layout in LAYOUTS.items()}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "adamw"])
def test_two_ranks(alone: dict[str, Curve], recipe: str, ranks: Ranks, kind: str) -> None:
    for rank in ranks.run(on_each_layout, recipe, kind, size=2):
        for layout, made in rank.items():
            assert alone[kind].distance(made) <= EXACT, layout


def _of_this_rank(sums: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    return list(sums)


def _parts_as_wholes(
    self: Exchange, parts: Sequence[Tensor], shapes: object, work: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    return [work(part) for part in parts]


MUTANTS = {
    "lamb": ("danlu.optim.lamb.total", _of_this_rank),
    "adafactor": ("danlu.optim.adafactor.total", _of_this_rank),
    "muon": ("danlu.optim.sharing.Exchange.each", _parts_as_wholes),
}


def mutants(world: World, recipe: str) -> dict[str, Curve]:
    """The faults of a sharded optimiser: a norm, a mean or a matrix that is only this rank's part of the weight's."""
    made = {}
    for kind, (place, fault) in MUTANTS.items():
        with mock.patch(place, fault):
            made[kind] = curve(world, recipe, [*KINDS[kind], *LAYOUTS["shard"]])
    return made


def test_parts_taken_for_wholes_are_caught(alone: dict[str, Curve], recipe: str, ranks: Ranks) -> None:
    for kind, made in ranks.run(mutants, recipe, size=2)[0].items():
        assert alone[kind].distance(made) > 1e-4, kind


def in_a_square(world: World, recipe: str) -> dict[str, Curve]:
    return {kind: curve(world, recipe, [*given, *HYBRID]) for kind, given in KINDS.items() if kind != "adamw"}


def test_two_by_two_ranks(alone: dict[str, Curve], recipe: str, ranks: Ranks) -> None:
    for rank in ranks.run(in_a_square, recipe, size=4):
        for kind, made in rank.items():
            assert alone[kind].distance(made) <= EXACT, kind


def kept(world: World, recipe: str, folder: str, plan: list[str]) -> dict[str, Curve]:
    """Each optimiser's curve, saved after update 2."""
    return {
        kind: curve(world, recipe, [*given, *plan], 0, f"{folder}/{kind}/{world.size}") for kind, given in KINDS.items()
    }


def gone_on(world: World, recipe: str, folder: str, plan: list[str], saved_on: int) -> dict[str, Curve]:
    """Each optimiser's curve from update 3 on."""
    return {
        kind: curve(world, recipe, [*given, *plan], 2, f"{folder}/{kind}/{saved_on}") for kind, given in KINDS.items()
    }


@pytest.mark.parametrize("saved_on", [1, pytest.param(2, marks=pytest.mark.long)])
def test_resume_at_half(alone: dict[str, Curve], recipe: str, ranks: Ranks, tmp_path: Path, saved_on: int) -> None:
    whole = ranks.run(kept, recipe, str(tmp_path), [MICRO], size=saved_on)[0]
    for resumed_on in (1, 2):
        for rest in ranks.run(gone_on, recipe, str(tmp_path), [MICRO], saved_on, size=resumed_on):
            for kind, made in rest.items():
                one = whole[kind]
                rest_of_it = Curve(one.losses[2:], one.norms[2:], one.weights[2:], one.samples[2:], one.end)
                assert len(made.losses) == STEPS - 2
                if saved_on == resumed_on:
                    assert rest_of_it.losses == made.losses and rest_of_it.norms == made.norms, kind
                    assert all((one.end[name] == made.end[name]).all() for name in one.end), kind
                else:
                    assert rest_of_it.distance(made) <= EXACT, kind


@pytest.mark.parametrize("kind", KINDS)
def test_states_in_a_file_move_weights_the_same_to_the_bit(recipe: str, tmp_path: Path, kind: str) -> None:
    given = [*KINDS[kind], MICRO, "memory.precision=fp32"]
    here = curve(World(), recipe, given)
    away = curve(World(), recipe, [*given, "memory.offload=[optimizer]", f"memory.offload_folder={tmp_path}"])
    assert here.losses == away.losses and all((here.end[name] == away.end[name]).all() for name in here.end)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_in_bf16_come_back_to_the_bit(recipe: str, tmp_path: Path, kind: str) -> None:
    given = [*KINDS[kind], MICRO, "memory.precision=bf16_pure"]
    whole, rest = (curve(World(), recipe, given, start, str(tmp_path)) for start in (0, 2))
    assert whole.losses[2:] == rest.losses and all((whole.end[name] == rest.end[name]).all() for name in whole.end)


def learnt(recipe: str, given: list[str]) -> list[float]:
    """Losses of 80 updates in fp32."""
    materials = gather(
        load(recipe, ["memory.precision=fp32", "max_steps=80", "optimizer.learning_rate=3e-3", *WIDE, *given]),
        world=World(),
        device=torch.device("cpu"),
        announce=lambda text: None,
    )
    run = build(materials)
    losses = [step(run, run.source.take(materials.micros)).loss for _ in range(80)]
    run.source.close()
    return losses


def test_8_bit_moments_learn_as_full_ones_do(recipe: str) -> None:
    full = learnt(recipe, [])
    coded = learnt(recipe, ["optimizer.kind=adamw8bit", "optimizer.full_embedding=false"])
    assert full != coded and full[-1] < 0.75 * full[0]
    fall = full[0] - full[-1]
    assert max(abs(a - b) for a, b in zip(full, coded)) < 0.002 * fall
