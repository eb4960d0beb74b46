"""A crash costs nothing: killed at any moment, a resumed run is equal to the bit to one that never was."""

from __future__ import annotations

import random
import shutil
import time
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
    Moment("danlu.train.loop", "evaluate", 2),
    Moment("danlu.monitor.books", "Books.evaluated", 2),
    Moment("danlu.checkpoint.folder", "remove_checkpoint", 2),
    Moment("danlu.train.loop", "restore"),
    Moment("danlu.checkpoint.commit", "write_manifest", 2),
    Moment("danlu.train.loop", "finish"),
    Moment("danlu.train.finish", "publish"),
    Moment("danlu.checkpoint.model", "_sync", 2),
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


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_killed_a_hundred_times_on_two_ranks(tmp_path: Path) -> None:
    """One rank of two is killed; the other ends by itself; together they go on."""
    reference = runs.write_recipe(tmp_path / "unhurt")
    begun = time.monotonic()
    assert runs.finish(reference, ranks=2) == 0, runs.said(reference)
    seconds = time.monotonic() - begun
    recipe = runs.write_recipe(tmp_path / "hurt")
    chance = random.Random(12)
    kills = 0
    while kills < 100:
        ranks = runs.start(recipe, ranks=2)
        victim = chance.choice(ranks)
        victim.join(chance.uniform(0.05, 0.6) * seconds)
        if victim.exitcode is None:
            victim.kill()
            kills += 1
        codes = runs.end(ranks, seconds=60)
        assert set(codes) <= {0, 1, -9}, runs.said(recipe)
        if codes == [0, 0]:
            runs.same(recipe, reference)
            shutil.rmtree(runs.folder(recipe))
            (recipe.parent / "samples.txt").unlink()
    assert runs.finish(recipe, ranks=2) == 0, runs.said(recipe)
    runs.same(recipe, reference)
