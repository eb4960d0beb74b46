"""The gradient noise scale: against gradients of rows computed one by one, under any layout, moving nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from danlu.core.batch import Batch
from danlu.core.errors import InputError
from danlu.core.world import World
from danlu.monitor.noise import NoiseScale
from danlu.recipe.yaml import load
from danlu.train.assemble import build, gather
from danlu.train.step import step
from tests.equal.curves import STEPS, Curve, curve, write_recipe
from tests.ranks import Ranks

EXACT = 1e-12
NAMES = ("noise_signal", "noise_spread", "noise_scale")


@dataclass
class Rows:
    """Of one update, row by row in the order of the samples: gradient of the summed loss, and labels."""

    gradients: np.ndarray
    labels: np.ndarray

    def expected(self, part: Sequence[int]) -> NoiseScale:
        """What looking at these rows, beside all, comes to."""
        made = NoiseScale(every=1)
        rows = list(part)
        small = self.gradients[rows].sum(0) / self.labels[rows].sum()
        large = self.gradients.sum(0) / self.labels.sum()
        made.see(
            small=float(small @ small),
            large=float(large @ large),
            part=float(self.labels[rows].sum()),
            whole=float(self.labels.sum()),
        )
        return made


def one_by_one(world: World, recipe: str) -> Rows:
    """The first update's rows, each in a forward and backward of its own."""
    materials = gather(load(recipe), world=world, device=torch.device("cpu"), announce=lambda text: None)
    run = build(materials)
    [batch] = run.source.take(materials.micros)
    run.source.close()
    gradients, labels = [], []
    for row in range(len(batch)):
        one: Batch = batch.rows(row, row + 1)
        run.objective.loss(run.compute.forward(one), one).total().backward()
        gradients.append(torch.cat([w.grad.reshape(-1) for w in run.weights.values()]).numpy())
        labels.append(run.objective.count(one).total().item())
        run.optim.zero()
    return Rows(np.stack(gradients), np.asarray(labels))


def measured(world: World, recipe: str, overrides: list[str]) -> list[dict[str, float]]:
    """What each update reports of its noise."""
    torch.use_deterministic_algorithms(True)
    materials = gather(load(recipe, overrides), world=world, device=torch.device("cpu"), announce=lambda text: None)
    run = build(materials)
    reports = [step(run, run.source.take(materials.micros)) for _ in range(STEPS)]
    run.source.close()
    return [{name: value for name, value in report.extra.items() if name in NAMES} for report in reports]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_recipe(tmp_path_factory.mktemp("noise")))


@pytest.fixture(scope="module")
def rows(recipe: str) -> Rows:
    made = one_by_one(World(), recipe)
    assert len(made.labels) == 8 and len(set(made.labels)) > 1, "rows weigh alike: nothing uneven is tried"
    return made


def close(found: dict[str, float], expected: NoiseScale) -> None:
    facts = expected.facts()
    assert found.keys() == facts.keys()
    for name, value in facts.items():
        assert found[name] == pytest.approx(value, rel=1e-9), name


@pytest.mark.parametrize(("micro", "part"), [(2, range(2)), (1, range(1)), (4, range(4)), (8, range(4))])
def test_one_process(recipe: str, rows: Rows, micro: int, part: range) -> None:
    """The first micro-batch is the part; one that is alone is cut in two."""
    made = measured(World(), recipe, ["monitor.noise_steps=1", f"batch.micro_batch_size={micro}"])
    close(made[0], rows.expected(part))


@pytest.mark.parametrize(
    "plan", ["parallel.shard=2", "parallel.replicate=2", "parallel.zero=1", "parallel.zero=2"], ids=lambda plan: plan
)
@pytest.mark.parametrize(("micro", "part"), [(2, [0, 1, 4, 5]), (1, [0, 4]), (4, [0, 1, 4, 5])])
def test_two_ranks(recipe: str, rows: Rows, ranks: Ranks, plan: str, micro: int, part: list[int]) -> None:
    given = ["monitor.noise_steps=1", f"batch.micro_batch_size={micro}", plan]
    first, second = ranks.run(measured, recipe, given, size=2)
    assert first == second
    close(first[0], rows.expected(part))


def test_measuring_moves_nothing(recipe: str, ranks: Ranks) -> None:
    whole: Curve = curve(World(), recipe, [])
    for plan in (["batch.micro_batch_size=8"], ["batch.micro_batch_size=2"]):
        assert whole.distance(curve(World(), recipe, [*plan, "monitor.noise_steps=1"])) <= EXACT
    for plan in (["parallel.zero=1"], ["parallel.zero=3"], ["parallel.replicate=2"]):
        given = [*plan, "batch.micro_batch_size=1", "monitor.noise_steps=1"]
        for made in ranks.run(curve, recipe, given, size=2):
            assert whole.distance(made) <= EXACT


def test_the_loss_scale_of_fp16_is_taken_out(recipe: str, rows: Rows) -> None:
    [first, *_] = measured(
        World(), recipe, ["memory.precision=fp16", "monitor.noise_steps=1", "batch.micro_batch_size=2"]
    )
    for name, value in rows.expected(range(2)).facts().items():
        assert first[name] == pytest.approx(value, rel=0.05), name


@pytest.mark.parametrize("away", ["optimizer", "weights, gradients, optimizer"])
def test_with_parts_on_the_host(recipe: str, rows: Rows, away: str) -> None:
    given = [f"memory.offload=[{away}]", "monitor.noise_steps=1", "batch.micro_batch_size=2", "optimizer.average={}"]
    close(measured(World(), recipe, given)[0], rows.expected(range(2)))


def test_one_row_on_each_rank_is_refused(recipe: str) -> None:
    with pytest.raises(InputError, match=r"monitor.noise_steps: an update of one row"):
        measured(World(), recipe, ["batch.global_batch_size=1", "batch.micro_batch_size=1", "monitor.noise_steps=1"])


def test_only_where_it_is_due(recipe: str) -> None:
    made = measured(World(), recipe, ["monitor.noise_steps=2", "batch.micro_batch_size=2"])
    assert [bool(facts) for facts in made] == [False, True, False, True, False]
    assert not any(measured(World(), recipe, ["batch.micro_batch_size=2"]))
