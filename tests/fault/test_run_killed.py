"""A crash costs nothing: killed at any moment, a resumed run is equal to the bit to one that never was."""

from __future__ import annotations

import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fault import runs
from tests.fault.runs import Moment

# Moments that chance alone would seldom meet, in the order in which one run comes to them; each is the last thing that
# one process does.
MOMENTS = [
    Moment("danlu.train.data", "tokenise"),
    Moment("danlu.train.assemble", "fill"),
    Moment("danlu.recipe.yaml", "save"),
    Moment("danlu.train.loop", "rehearse"),
    Moment("danlu.train.loop", "open_watch"),
    Moment("danlu.train.loop", "step", 2),
    Moment("danlu.optim.layer", "OptimLayer.step", 3),
    Moment("danlu.monitor.books", "Books.add", 4),
    Moment("danlu.checkpoint.commit", "write_part", 1),
    Moment("danlu.checkpoint.disk", "Disk.rename", 1),
    Moment("danlu.checkpoint.disk", "Disk.rename", 2),
    Moment("danlu.checkpoint.commit", "prune", 3),
    Moment("danlu.checkpoint.commit", "commit", 2),
    Moment("danlu.monitor.jsonl", "cut"),
    Moment("danlu.train.measure", "evaluate", 2),
    Moment("danlu.monitor.books", "Books.evaluated", 2),
    Moment("danlu.checkpoint.folder", "remove_checkpoint", 2),
    Moment("danlu.train.loop", "restore"),
    Moment("danlu.checkpoint.commit", "write_manifest", 1),
    Moment("danlu.train.loop", "finish"),
    Moment("danlu.train.finish", "publish"),
    Moment("danlu.checkpoint.model", "make_durable", 2),
]
RANDOM = 16  # kills at moments that only the clock knows


@pytest.fixture(scope="module")
def unhurt(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A run that was left alone, and how long it took."""
    recipe = runs.write_recipe(tmp_path_factory.mktemp("unhurt"))
    assert runs.finish(recipe) == 0, runs.said(recipe)
    shutil.rmtree(runs.folder(recipe))  # once more: the first one also started the server of processes
    (recipe.parent / "samples.txt").unlink()
    begun = time.monotonic()
    assert runs.finish(recipe) == 0, runs.said(recipe)
    return recipe, time.monotonic() - begun


def test_killed_at_every_kind_of_moment(unhurt: tuple[Path, float], tmp_path: Path) -> None:
    recipe = runs.write_recipe(tmp_path)
    for moment in MOMENTS:
        code = runs.finish(recipe, prepare=moment)
        assert code == -9, f"{moment} was never met: the run ended with {code}\n{runs.said(recipe)}"
    assert runs.finish(recipe) == 0, runs.said(recipe)
    runs.same(recipe, unhurt[0])
    print(f"{len(MOMENTS)} kills at chosen moments, 0 lost updates")


def test_killed_at_random_moments(unhurt: tuple[Path, float], tmp_path: Path) -> None:
    reference, seconds = unhurt
    recipe = runs.write_recipe(tmp_path)
    chance = random.Random(11)
    kills = ended = in_a_save = 0
    while kills < RANDOM:
        [process] = runs.start(recipe)
        process.join(chance.uniform(0.05, 0.6) * seconds)
        if process.exitcode is None:
            process.kill()
            kills += 1
        process.join()
        assert process.exitcode in (0, -9), runs.said(recipe)
        in_a_save += any((runs.folder(recipe) / "checkpoints").glob("tmp-*"))
        if process.exitcode == 0:  # it came to its end: begin anew, so that every part of a run is met
            ended += 1
            runs.same(recipe, reference)
            shutil.rmtree(runs.folder(recipe))
            (tmp_path / "samples.txt").unlink()
    assert runs.finish(recipe) == 0, runs.said(recipe)
    runs.same(recipe, reference)
    print(f"{kills} kills at random moments, {in_a_save} in a save, {ended + 1} runs to their end, 0 lost updates")


@dataclass(frozen=True)
class InASave:
    """One rank is killed while it writes its part, and its peer waits for that part, and for nothing else."""

    rank: int

    def __call__(self) -> None:
        from danlu.train import loop

        save = loop.Loop._save
        loop.Loop._save = lambda each, loss, *, wait, due: save(each, loss, wait=True, due=due)  # type: ignore
        Moment("danlu.checkpoint.commit", "write_part" if self.rank else "commit", 2, rank=self.rank)()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_peer_died_in_a_save_ends_within_seconds(tmp_path: Path, rank: int) -> None:
    recipe = runs.write_recipe(tmp_path)
    begun = time.monotonic()
    codes = runs.end(runs.start(recipe, prepare=InASave(rank), ranks=2), seconds=60)
    assert time.monotonic() - begun < 45
    assert sorted(codes) == [-9, 1] and codes[rank] == -9
    assert runs.said(recipe).count("another rank failed, ended or does not answer") == 1
    assert [path.name for path in (runs.folder(recipe) / "checkpoints").glob("step-*")] == ["step-000003"]


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("count", "most"), [(2, 60), (4, 10)])
def test_one_rank_killed_many_times(tmp_path: Path, count: int, most: int) -> None:
    """One rank is killed; the others end by themselves once they have met; together they go on."""
    reference = runs.write_recipe(tmp_path / "unhurt")
    assert runs.finish(reference, ranks=count) == 0, runs.said(reference)
    recipe = runs.write_recipe(tmp_path / "hurt")
    chance = random.Random(12)
    kills = 0
    while kills < most:
        ranks = runs.start(recipe, ranks=count)
        lines = recipe.parent / "samples.txt"
        before = lines.stat().st_size if lines.exists() else 0
        while ranks[0].exitcode is None and (not lines.exists() or lines.stat().st_size == before):
            time.sleep(0.01)  # before they met, a rank without a launcher waits long for the other
        victim = chance.choice(ranks)
        victim.join(chance.uniform(0, 1.5))
        if victim.exitcode is None:
            victim.kill()
            kills += 1
        codes = runs.end(ranks, seconds=60)
        assert set(codes) <= {0, 1, -9}, runs.said(recipe)
        if set(codes) == {0}:
            runs.same(recipe, reference)
            shutil.rmtree(runs.folder(recipe))
            (recipe.parent / "samples.txt").unlink()
    assert runs.finish(recipe, ranks=count) == 0, runs.said(recipe)
    runs.same(recipe, reference)
