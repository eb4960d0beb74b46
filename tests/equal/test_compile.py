"""Compiled blocks give the gradients of blocks as written, in float64, to 1e-12: also cut over ranks and recomputed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from danlu.compute import compile as compiling
from danlu.core.world import World
from tests.equal.curves import write_recipe
from tests.equal.gradients import Gradients, apart, gradients
from tests.ranks import Ranks

EXACT = 1e-12


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_recipe(tmp_path_factory.mktemp("compile")))


@pytest.fixture(scope="module")
def one(recipe: str) -> Gradients:
    return gradients(World(), recipe, [])


@pytest.fixture
def fresh() -> Iterator[None]:
    """No compiled code is left of another test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def traced(world: World, recipe: str, overrides: list[str]) -> tuple[Gradients, int]:
    """The gradients of blocks compiled to the point where code would be made, and how many graphs that took."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    backend, compiling.BACKEND = compiling.BACKEND, "aot_eager"
    try:
        made = gradients(world, recipe, ["compile=true", *overrides])
    finally:
        compiling.BACKEND = backend
    assert not counters["graph_break"]
    return made, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("kind", ["none", "selective", "full"])
def test_one_process(one: Gradients, recipe: str, kind: str, fresh: None) -> None:
    made, graphs = traced(World(), recipe, ["batch.micro_batch_size=2", f"memory.recompute={kind}"])
    assert apart(one, made) <= EXACT
    assert graphs == 1  # for two blocks, four micro-batches and three updates


@pytest.mark.parametrize(("zero", "kind"), [(3, "none"), (3, "full"), (1, "selective")])
def test_cut_over_two_ranks(one: Gradients, recipe: str, ranks: Ranks, zero: int, kind: str) -> None:
    plan = ["batch.micro_batch_size=2", f"parallel.zero={zero}", f"memory.recompute={kind}"]
    for made, graphs in ranks.run(traced, recipe, plan, size=2):
        assert apart(one, made) <= EXACT
        assert graphs == 1


@pytest.mark.long
def test_code_that_is_really_made(one: Gradients, recipe: str, fresh: None) -> None:
    made = gradients(World(), recipe, ["compile=true", "batch.micro_batch_size=4"])
    assert apart(one, made) <= EXACT
