"""The layout never changes the mathematics: one curve, in float64, to 1e-12, whatever the plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from danlu.core.world import World
from tests.equal.curves import STEPS, Curve, curve, mutant, write_recipe
from tests.ranks import Ranks

EXACT = 1e-12


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_recipe(tmp_path_factory.mktemp("equal")))


@pytest.fixture(scope="module")
def one(recipe: str) -> Curve:
    """One process, the whole batch in one forward."""
    made = curve(World(), recipe, [])
    assert len(made.losses) == STEPS and made.losses[-1] < made.losses[0]
    assert max(made.norms) > 0.5, "clipping is not met"
    assert len(set(made.weights)) > 1, "every update weighs the same: nothing uneven is tried"
    return made


@pytest.mark.parametrize(
    "overrides",
    [
        ["batch.micro_batch_size=4"],
        ["batch.micro_batch_size=2"],
        ["batch.micro_batch_size=1"],
        ["data.workers=0"],
        ["data.workers=3", "data.prefetch=5"],
    ],
    ids=lambda given: " ".join(given),
)
def test_one_process(one: Curve, recipe: str, overrides: list[str]) -> None:
    other = curve(World(), recipe, overrides)
    assert one.distance(other) <= EXACT
    assert one.samples == other.samples


@pytest.mark.parametrize("micro", [4, 2, 1])
@pytest.mark.parametrize("axis", ["replicate", "shard"])
def test_two_ranks(one: Curve, recipe: str, ranks: Ranks, axis: str, micro: int) -> None:
    other = "shard" if axis == "replicate" else "replicate"
    plan = [f"parallel.{axis}=2", f"parallel.{other}=1", f"batch.micro_batch_size={micro}"]
    for made in ranks.run(curve, recipe, plan, size=2):
        assert one.distance(made) <= EXACT


def test_two_by_two_ranks(one: Curve, recipe: str, ranks: Ranks) -> None:
    plan = ["parallel.replicate=2", "parallel.shard=2", "batch.micro_batch_size=1"]
    for made in ranks.run(curve, recipe, plan, size=4):
        assert one.distance(made) <= EXACT


def test_every_rank_reads_its_own_rows_and_together_all(one: Curve, recipe: str, ranks: Ranks) -> None:
    halves = ranks.run(curve, recipe, ["batch.micro_batch_size=4"], size=2)
    for update in range(STEPS):
        assert halves[0].samples[update] + halves[1].samples[update] == one.samples[update]


def test_resume_on_the_same_layout_is_equal_to_the_bit(recipe: str, ranks: Ranks, tmp_path: Path) -> None:
    plan = ["batch.micro_batch_size=2", "memory.precision=fp32"]
    whole = ranks.run(curve, recipe, plan, 0, str(tmp_path), size=2)
    rest = ranks.run(curve, recipe, plan, 2, str(tmp_path), size=2)
    for before, after in zip(whole, rest):
        assert before.losses[2:] == after.losses and before.norms[2:] == after.norms
        assert all((before.end[name] == after.end[name]).all() for name in before.end)


def test_packing_changes_nothing_where_no_document_is_cut(tmp_path: Path) -> None:
    """Documents that fill rows exactly: packed rows and a row a document learn the same from the same update."""
    lengths = [7, 23, 15, 15, 31, 3, 11, 15]  # with an end token each: 8 + 24, 16 + 16, 32, 4 + 12 + 16
    text = "\n".join("abcdefgh"[i] * n for i, n in enumerate(lengths))
    recipe = write_recipe(tmp_path)
    (tmp_path / "lines.txt").write_text(text)
    same = ["data.validation=0", "batch.micro_batch_size=auto"]
    packed = curve(World(), str(recipe), [*same, "batch.global_batch_size=4"])
    alone = curve(World(), str(recipe), [*same, "batch.global_batch_size=8", "data.packing=false"])
    assert packed.weights == alone.weights == [float(sum(lengths))] * STEPS
    assert packed.distance(alone) <= EXACT


@pytest.mark.parametrize("size", [1, 2])
def test_a_mean_of_means_is_caught(one: Curve, recipe: str, ranks: Ranks, size: int) -> None:
    made = ranks.run(mutant, recipe, ["batch.micro_batch_size=2"], size=size)[0]
    assert one.distance(made) > 1e-4
