"""What a checkpoint holds of a run: every part comes back by name, and a missing one is refused by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from danlu.checkpoint.disk import Disk
from danlu.checkpoint.keep import Checkpoint
from danlu.checkpoint.load import Want, newest, read
from danlu.checkpoint.save import Saver, Snapshot
from danlu.core.errors import InputError
from danlu.core.world import World
from danlu.recipe.yaml import load
from danlu.train import state
from danlu.train.assemble import build, gather
from danlu.train.run import Run
from danlu.train.step import step
from tests.fault.runs import write_recipe
from tests.ranks import Ranks

ALONE = World()


def made(recipe: Path, *overrides: str, world: World = ALONE, updates: int = 3) -> Run:
    """A run after some updates."""
    settings = load(str(recipe), overrides)
    materials = gather(settings, world=world, device=torch.device("cpu"), announce=lambda text: None)
    run = build(materials)
    for _ in range(updates):
        step(run, run.source.take(materials.micros))
    return run


def kept(folder: Path, run: Run, change: Callable[[Snapshot], Snapshot] = lambda given: given) -> None:
    """The run is saved, changed on the way."""
    world = run.compute.world
    settings = Checkpoint(asynchronous=False)
    saver = Saver(folder, settings, rank=world.rank, world=world.size, attempt="a")
    saver.save(change(state.snapshot(run, facts={}, metric=None)))


def without(*keys: str) -> Callable[[Snapshot], Snapshot]:
    return lambda given: replace(given, pieces={k: p for k, p in given.pieces.items() if k not in keys})


def facts(change: Callable[[dict[str, Any]], object]) -> Callable[[Snapshot], Snapshot]:
    def changed(given: Snapshot) -> Snapshot:
        run = dict(given.facts["run"])
        change(run)
        return replace(given, facts={**given.facts, "run": run})

    return changed


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="module")
def run(recipe: Path) -> Run:
    return made(recipe)


def test_everything_comes_back(run: Run, recipe: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    kept(tmp_path, run)
    drawn = torch.rand(3)
    other = made(recipe, updates=0)
    found = newest(tmp_path)
    assert found is not None
    state.restore(other, found)
    assert torch.equal(torch.rand(3), drawn)
    assert (other.step, other.tokens, other.skipped) == (3, run.tokens, 0) and run.tokens > 3 * 8 * 20
    assert other.source.state() == {"samples": 24}
    assert all(torch.equal(other.weights[name], weight) for name, weight in run.weights.items())
    ours, theirs = run.optim.state(), other.optim.state()
    assert ours.keys() == theirs.keys() and len(ours) == 3 * len(run.weights)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert ours["step/embed.weight"].item() == 3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without("weights/norm.weight"), "missing weights/norm.weight"),
        (without("optimizer/exp_avg/norm.weight"), "missing: optimizer/exp_avg/norm.weight"),
        (without("optimizer/step/embed.weight"), "missing: optimizer/step/embed.weight"),
        (lambda s: replace(s, pieces={k: p for k, p in s.pieces.items() if k[0] == "w"}), "state of every weight"),
        (
            lambda s: replace(s, pieces={**s.pieces, "weights/extra": s.pieces["weights/norm.weight"]}),
            "unknown weights/ex",
        ),
        (lambda s: replace(s, streams={}), "the random stream 'torch'"),
        (facts(lambda f: f.pop("source")), "its facts hold no 'source'"),
        (facts(lambda f: f.pop("step")), "its facts hold no 'step'"),
        (facts(lambda f: f.update(source={"rows": 3})), "a data position is"),
        (lambda s: replace(s, facts={}), "its facts hold no 'run'"),
    ],
)
def test_a_missing_part_is_refused_by_name(
    run: Run, recipe: Path, tmp_path: Path, change: Callable[[Snapshot], Snapshot], says: str
) -> None:
    kept(tmp_path, run, change)
    found = newest(tmp_path)
    assert found is not None
    with pytest.raises(InputError, match=says) as refusal:
        state.restore(made(recipe, updates=0), found)
    assert "step-000003" in str(refusal.value)


def test_weights_alone_come_back_without_moving_the_run(run: Run, recipe: Path, tmp_path: Path) -> None:
    kept(tmp_path, run)
    other = made(recipe, updates=1)
    found = newest(tmp_path)
    assert found is not None
    moments = {key: value.clone() for key, value in other.optim.state().items()}
    state.restore_weights(other, found)
    assert all(torch.equal(other.weights[name], weight) for name, weight in run.weights.items())
    assert other.step == 1 and all(torch.equal(moments[k], v) for k, v in other.optim.state().items())


def draws(world: World, recipe: str, folder: str) -> tuple[list[float], list[float]]:
    """What a part that draws from torch's own stream draws after a save, and again after coming back."""
    torch.manual_seed(100 + world.rank)
    run = made(Path(recipe), world=world, updates=1)
    kept(Path(folder), run)
    before = torch.rand(3).tolist()
    torch.manual_seed(1)
    found = newest(Path(folder))
    assert found is not None
    state.restore(run, found)
    return before, torch.rand(3).tolist()


def test_each_rank_goes_on_with_its_own_random_stream(recipe: Path, tmp_path: Path, ranks: Ranks) -> None:
    (one, again), (two, also) = ranks.run(draws, str(recipe), str(tmp_path), size=2)
    assert one == again and two == also and one != two


def tied(world: World, recipe: str, folder: str) -> list[list[float]]:
    """The table at the start and after each of three updates, the last one after a save and a return."""
    run = made(Path(recipe), world=world, updates=0)
    tables = []
    for update in range(4):
        head = run.compute.model.heads["language"].weight
        table = run.compute.model.embed.weight  # type: ignore[union-attr]
        assert head is table, f"after {update} updates the tie is broken"
        assert sum(1 for weight in run.weights.values() if weight.shape == table.shape) == 1
        tables.append(table.full_tensor().flatten().tolist() if world.size > 1 else table.flatten().tolist())
        if update == 2:
            kept(Path(folder), run)
            run = made(Path(recipe), world=world, updates=0)
            found = newest(Path(folder))
            assert found is not None
            state.restore(run, found)
        if update < 3:
            step(run, run.source.take(1))
    run.source.close()
    return tables


def test_a_tie_holds_under_shards_at_every_update_and_after_coming_back(
    recipe: Path, tmp_path: Path, ranks: Ranks
) -> None:
    both = ranks.run(tied, str(recipe), str(tmp_path / "two"), size=2)
    alone = tied(World(), str(recipe), str(tmp_path / "one"))
    assert both[0] == both[1]
    for ours, theirs in zip(both[0], alone, strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=0, atol=1e-5)
    assert alone[0] != alone[1] != alone[2] != alone[3]


def test_states_in_a_file_are_saved_as_they_were_while_training_goes_on(recipe: Path, tmp_path: Path) -> None:
    """Nothing of them is copied: a save under way reads them where the updates that follow do not write."""
    away = ["memory.offload=[optimizer]", f"memory.offload_folder={tmp_path / 'states'}", "optimizer.average={}"]
    run = made(recipe, *away, updates=2)
    begun, go = threading.Event(), threading.Event()

    class Slow(Disk):
        def create(self, path: Path) -> int:
            if path.suffix == ".safetensors":
                begun.set()
                assert go.wait(20)
            return super().create(path)

    saver = Saver(tmp_path / "saved", Checkpoint(), disk=Slow())
    given = state.snapshot(run, facts={}, metric=None)
    still = {key for key, piece in given.pieces.items() if piece.still}
    kinds = {key.split("/")[1] for key in given.pieces if key.startswith("optimizer/")}
    assert kinds == {"exp_avg", "exp_avg_sq", "step", "average"}
    assert still == {key for key in given.pieces if key.startswith("optimizer/") and "/average/" not in key}
    copies = {key: piece.tensor.clone() for key, piece in given.pieces.items()}
    saver.save(given)
    del given
    assert begun.wait(20)
    for _ in range(2):
        step(run, run.source.take(1))
    go.set()
    saver.finish()
    found = newest(tmp_path / "saved")
    assert found is not None and found.step == 2
    there = read(found, {key: Want.whole(copy) for key, copy in copies.items()})
    assert all(torch.equal(there[key], copies[key]) for key in copies)
    assert not torch.equal(run.optim.state()["exp_avg/embed.weight"], copies["optimizer/exp_avg/embed.weight"])


def test_a_run_with_states_in_a_file_goes_back_and_on_again(recipe: Path, tmp_path: Path) -> None:
    run = made(recipe, "memory.offload=[optimizer]", f"memory.offload_folder={tmp_path / 'states'}", updates=2)
    kept(tmp_path / "saved", run)
    ends = []
    for _ in range(2):
        for _ in range(2):
            step(run, run.source.take(1))
        ends.append({name: weight.detach().clone() for name, weight in run.weights.items()})
        found = newest(tmp_path / "saved")
        assert found is not None
        state.restore(run, found)
    assert run.step == 2
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
