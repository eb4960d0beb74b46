"""A crash costs nothing: killed at any moment, a resumed run is equal to the bit to one that never was."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from tests.fault import runs

KILLS = 24


@pytest.fixture(scope="module")
def unhurt(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A run that was left alone, and how long it took."""
    recipe = runs.write_recipe(tmp_path_factory.mktemp("unhurt"))
    begun = time.monotonic()
    assert runs.finish(recipe) == 0, runs.said(recipe)
    return recipe, time.monotonic() - begun


def test_killed_at_random_moments(unhurt: tuple[Path, float], tmp_path: Path) -> None:
    reference, seconds = unhurt
    recipe = runs.write_recipe(tmp_path)
    chance = random.Random(11)
    kills = ended = 0
    while kills < KILLS:
        process = runs.start(recipe)
        process.join(chance.uniform(0.1, 0.9) * seconds)
        if process.exitcode is None:
            process.kill()
            kills += 1
        elif process.exitcode == 0:  # it came to its end: begin anew, so that every moment of a run is met
            ended += 1
            _compare(reference, recipe)
            assert runs.finish(recipe, "max_steps=30") == 0
            (tmp_path / "samples.txt").unlink()
            _remove(tmp_path / "runs" / "fault")
        process.join()
        assert process.exitcode in (0, -9), runs.said(recipe)
    assert runs.finish(recipe) == 0, runs.said(recipe)
    _compare(reference, recipe)
    print(f"{kills} kills, {ended + 1} runs to their end, 0 lost updates")


def _compare(reference: Path, recipe: Path) -> None:
    assert runs.metrics(recipe) == runs.metrics(reference)
    theirs, ours = _samples(reference), _samples(recipe)
    assert ours == theirs
    last = Path("runs/fault/checkpoints/step-000030/rank-000.safetensors")
    assert (recipe.parent / last).read_bytes() == (reference.parent / last).read_bytes()
    weights = Path("runs/fault/model/model.safetensors")
    assert (recipe.parent / weights).read_bytes() == (reference.parent / weights).read_bytes()


def _samples(recipe: Path) -> dict[int, list[str]]:
    """The ids of each position; a position that was read twice must have given the same ids."""
    seen: dict[int, list[str]] = {}
    for line in (recipe.parent / "samples.txt").read_text().splitlines():
        at, ids = json.loads(line)
        assert seen.setdefault(at, ids) == ids
    return seen


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder)
