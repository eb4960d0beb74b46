"""ZeRO's stages on every mesh give one process's gradients, losses and weights, in float64, to 1e-12."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from danlu.core.world import World
from danlu.train.run import Run
from tests.equal.curves import Curve, curve, write_recipe
from tests.equal.gradients import Gradients, apart, gradients
from tests.ranks import Ranks

EXACT = 1e-12
LAYOUTS = {"shard": (1, 2), "replicate": (2, 1), "2x2": (2, 2)}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_recipe(tmp_path_factory.mktemp("zero")))


@pytest.fixture(scope="module")
def one(recipe: str) -> Gradients:
    return gradients(World(), recipe, [])


@pytest.fixture(scope="module")
def whole(recipe: str) -> Curve:
    return curve(World(), recipe, [])


def plan(layout: str, zero: int, micro: int) -> list[str]:
    replicate, shard = LAYOUTS[layout]
    cut = [f"parallel.replicate={replicate}", f"parallel.shard={shard}", f"parallel.zero={zero}"]
    return [*cut, f"batch.micro_batch_size={micro}"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_gradients_are_those_of_one_process(one: Gradients, recipe: str, ranks: Ranks, layout: str, zero: int) -> None:
    size = LAYOUTS[layout][0] * LAYOUTS[layout][1]
    for made in ranks.run(gradients, recipe, plan(layout, zero, 1), size=size):
        assert apart(one, made) <= EXACT


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("micro", [4, 2])
def test_curves_are_those_of_one_process(whole: Curve, recipe: str, ranks: Ranks, zero: int, micro: int) -> None:
    for made in ranks.run(curve, recipe, plan("shard", zero, micro), size=2):
        assert whole.distance(made) <= EXACT


@pytest.mark.parametrize(("before", "after"), [(("shard", 3), ("replicate", 1)), (("replicate", 2), ("shard", 2))])
def test_a_run_goes_on_under_another_stage(
    whole: Curve, recipe: str, ranks: Ranks, tmp_path: Path, before: tuple[str, int], after: tuple[str, int]
) -> None:
    ranks.run(curve, recipe, plan(*before, 2), 0, str(tmp_path), size=2)
    rest = Curve(whole.losses[2:], whole.norms[2:], whole.weights[2:], whole.samples[2:], whole.end)
    for made in ranks.run(curve, recipe, plan(*after, 1), 2, str(tmp_path), size=2):
        assert rest.distance(made) <= EXACT


def twice(run: Run) -> None:
    """The first micro-batch's gradients are added to the sum twice."""
    _meddle(run, 2.0)


def never(run: Run) -> None:
    """The first micro-batch's gradients are lost."""
    _meddle(run, 0.0)


def early(run: Run) -> None:
    """What is under way is added before it has arrived."""
    shards = run.compute.shards
    assert shards is not None and shards.reduction is not None
    begin = shards.begin

    def hasty(**place: bool) -> None:
        begin(**place)
        shards.reduction.hurry = False

    shards.begin = hasty  # type: ignore[method-assign]


def _meddle(run: Run, factor: float) -> None:
    shards = run.compute.shards
    assert shards is not None
    begin, seen = shards.begin, []

    def spoiled(*, first: bool, last: bool, **more: bool) -> None:
        if seen == [True]:  # the first backward is over, the second is to begin
            for weight in run.weights.values():
                weight.grad.mul_(factor)
        seen[:] = [] if last else [*seen, first]
        begin(first=first, last=last, **more)

    shards.begin = spoiled  # type: ignore[method-assign]


@pytest.mark.parametrize("spoil", [twice, never, early])
def test_a_reduction_gone_wrong_is_caught(one: Gradients, recipe: str, ranks: Ranks, spoil) -> None:
    made = ranks.run(gradients, recipe, plan("shard", 2, 2), spoil, size=2)[0]
    assert not apart(one, made) <= 1e-6


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_bf16_products_keep_every_micro_batch(recipe: str, ranks: Ranks, zero: int) -> None:
    """Autocast's copies of weights, kept over micro-batches, would lose the later ones' gradients."""
    low = ["memory.precision=bf16"]
    alone = gradients(World(), recipe, [*low, "batch.micro_batch_size=2"])
    for made in ranks.run(gradients, recipe, [*low, *plan("shard", zero, 2)], size=2):
        assert apart(alone[:1], made[:1]) < 0.02


def moved(world: World, recipe: str, overrides: list[str]) -> float:
    """How the model's answer moves when its cut weights are doubled after a forward without a backward."""
    from danlu.recipe.yaml import load
    from danlu.train.assemble import build, gather

    materials = gather(load(recipe, overrides), world=world, device=torch.device("cpu"), announce=lambda text: None)
    run = build(materials)
    batch = run.source.take(materials.micros)[0]
    run.source.close()

    def answer() -> float:
        with torch.no_grad():
            out = run.compute.forward(batch)
            return out.heads["language"].logits(out.hidden).abs().sum().item()

    before = answer()
    run.compute.release()
    for weight in run.weights.values():
        weight.detach().mul_(2)
    return answer() / before


@pytest.mark.parametrize("zero", [1, 3])
def test_weights_written_after_an_evaluation_are_those_that_are_used(recipe: str, ranks: Ranks, zero: int) -> None:
    alone = moved(World(), recipe, ["batch.micro_batch_size=2"])
    assert alone > 1.5
    first = ranks.run(moved, recipe, plan("shard", zero, 2), size=2)[0]
    assert first == pytest.approx(alone, rel=1e-12)
