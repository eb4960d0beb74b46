"""A run goes on under any other layout: every weight and moment to the bit, the same rows, the next losses to 1e-12."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from danlu.core import world as worlds
from danlu.core.world import World
from danlu.train import state
from danlu.train.run import Run
from danlu.train.step import step
from tests.equal.curves import STEPS, Curve, _assemble, _come_back, _save, curve, write_recipe
from tests.ranks import Ranks

EXACT = 1e-12
HALF = 2  # updates before the save


class Plan(NamedTuple):
    """A layout: ranks that replicate, ranks that shard, ZeRO's stage."""

    replicate: int
    shard: int
    zero: int = 3

    def __str__(self) -> str:
        return f"{self.replicate}x{self.shard}" + (f" zero {self.zero}" if self.zero != 3 else "")

    @property
    def size(self) -> int:
        return self.replicate * self.shard

    @property
    def overrides(self) -> list[str]:
        cut = [f"parallel.replicate={self.replicate}", f"parallel.shard={self.shard}", f"parallel.zero={self.zero}"]
        return [*cut, f"batch.micro_batch_size={max(1, 4 // self.size)}"]


SAVED = [Plan(1, 1), Plan(1, 2), Plan(2, 1), Plan(1, 4), Plan(4, 1), Plan(2, 2), Plan(1, 2, zero=1)]
RESUMED = [Plan(1, 1), Plan(1, 2), Plan(2, 1), Plan(2, 2)]
SELDOM = [Plan(1, 4), Plan(4, 1), Plan(1, 2, zero=1), Plan(2, 2, zero=2)]


class Resumed(NamedTuple):
    """What a rank found when it went on from a checkpoint."""

    here: Plan
    there: Plan
    compared: int  # tensors, this rank's slices of which were compared with the saved whole ones
    wrong: list[str]
    losses: list[float]
    norms: list[float]
    samples: list[tuple[str, ...]]


def save_under(world: World, recipe: str, folder: str, plans: Sequence[Plan]) -> None:
    """Under each plan, updates are made and saved; beside the checkpoint lie the whole tensors, not written by it."""
    for plan in plans:
        run, micros = _assemble(world, recipe, plan.overrides)
        for _ in range(HALF):
            step(run, run.source.take(micros))
        _save(run, Path(folder) / str(plan))
        run.source.close()
        _write_whole(run, Path(folder) / f"{plan}.npz")


def go_on_under(world: World, recipe: str, folder: str, plans: Sequence[Plan]) -> list[Resumed]:
    """Under each plan, from each checkpoint: what was loaded against what was saved, and how it goes on."""
    found = []
    for here in plans:
        for there in SAVED:
            run, micros = _assemble(world, recipe, here.overrides)
            _come_back(run, Path(folder) / str(there))
            compared, wrong = _compare(run, Path(folder) / f"{there}.npz")
            reports = [step(run, run.source.take(micros)) for _ in range(STEPS - HALF)]
            run.source.close()
            found.append(
                Resumed(
                    here,
                    there,
                    compared,
                    wrong,
                    [report.losses.total().item() for report in reports],
                    [report.norm.item() for report in reports],
                    [report.samples for report in reports],
                )
            )
    return found


def _write_whole(run: Run, path: Path) -> None:
    """Every weight and moment, put together from what each rank holds."""
    own = tuple((key, held.local.numpy(), held.shape, held.offset) for key, held in state._slices(run).items())
    wholes: dict[str, np.ndarray] = {}
    for key, local, shape, offset in worlds.together(run.compute.world, own):
        whole = wholes.setdefault(key, np.full(shape, math.nan, local.dtype))
        whole[_place(offset, local.shape)] = local
    assert not any(np.isnan(whole).any() for whole in wholes.values())
    if run.compute.world.first:
        np.savez(path, **{key.replace("/", "|"): whole for key, whole in wholes.items()})


def _compare(run: Run, path: Path) -> tuple[int, list[str]]:
    """Tensors compared, and those of which this rank's slice is not, bit by bit, what the whole has there."""
    with np.load(path, allow_pickle=False) as file:
        wholes = {key.replace("|", "/"): file[key] for key in file.files}
    slices = state._slices(run)
    wrong = sorted(wholes.keys() ^ slices.keys())
    for key in wholes.keys() & slices.keys():
        local, whole = slices[key].local.numpy(), wholes[key]
        there = whole[_place(slices[key].offset, local.shape)]
        if (local.dtype, local.tobytes()) != (there.dtype, there.tobytes()):
            wrong.append(key)
    return len(wholes), wrong


def _place(offset: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_recipe(tmp_path_factory.mktemp("resume")))


@pytest.fixture(scope="module")
def one(recipe: str) -> Curve:
    """One process that was never interrupted."""
    return curve(World(), recipe, [])


@pytest.fixture(scope="module")
def saved(recipe: str, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint under each plan."""
    folder = str(tmp_path_factory.mktemp("saved"))
    for size in sorted({plan.size for plan in SAVED}):
        ranks.run(save_under, recipe, folder, [plan for plan in SAVED if plan.size == size], size=size)
    return folder


def holds(one: Curve, made: list[list[Resumed]], plans: list[Plan]) -> None:
    """On every rank, from every checkpoint, under every plan."""
    assert [(each.here, each.there) for each in made[0]] == [(here, there) for here in plans for there in SAVED]
    for rank in made:
        for each in rank:
            where = f"{each.there} to {each.here}"
            assert each.wrong == [] and each.compared > 40, (where, each.wrong)
            for ours, theirs in ((each.losses, one.losses), (each.norms, one.norms)):
                assert np.allclose(ours, theirs[HALF:], rtol=EXACT, atol=0), where
    for together in zip(*made, strict=True):
        for update in range(STEPS - HALF):
            rows = [sample for each in together for sample in each.samples[update]]
            assert rows == list(one.samples[HALF + update]), f"{together[0].there} to {together[0].here}"


@pytest.mark.parametrize("size", [1, 2, 4])
def test_from_every_layout_to_another(one: Curve, recipe: str, saved: str, ranks: Ranks, size: int) -> None:
    plans = [plan for plan in RESUMED if plan.size == size]
    holds(one, ranks.run(go_on_under, recipe, saved, plans, size=size), plans)


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 4])
def test_from_every_layout_to_a_seldom_one(one: Curve, recipe: str, saved: str, ranks: Ranks, size: int) -> None:
    plans = [plan for plan in SELDOM if plan.size == size]
    holds(one, ranks.run(go_on_under, recipe, saved, plans, size=size), plans)


def spoiled(world: World, recipe: str, folder: str, plans: Sequence[Plan]) -> list[Resumed]:
    """The same, where one number of one moment is the next one that float64 knows."""
    whole = state.restore

    def restore(run: Run, found: object) -> None:
        whole(run, found)  # type: ignore[arg-type]
        moment = next(held.local for key, held in state._slices(run).items() if key.startswith("optimizer/exp_avg/"))
        moment.view(-1)[-1] = torch.nextafter(moment.view(-1)[-1], torch.tensor(9.0, dtype=moment.dtype))

    state.restore = restore  # type: ignore[assignment]
    try:
        return go_on_under(world, recipe, folder, plans)
    finally:
        state.restore = whole  # type: ignore[assignment]


def test_one_bit_of_one_moment_is_seen(one: Curve, recipe: str, saved: str) -> None:
    made = spoiled(World(), recipe, saved, [Plan(1, 1)])
    assert all(len(each.wrong) == 1 for each in made)
