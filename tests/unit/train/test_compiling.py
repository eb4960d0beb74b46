"""`compile` is settled once, kept by a run that goes on, and changed only where it is asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from danlu.compute import compile as compiling
from danlu.core.paths import RunFolder
from danlu.core.world import World
from danlu.recipe import yaml
from danlu.recipe.recipe import Recipe, resumes
from danlu.recipe.yaml import load
from danlu.train.assemble import build, gather
from danlu.train.begin import open_folder
from danlu.train.step import step
from tests.equal.curves import write_recipe


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return load(str(write_recipe(tmp_path_factory.mktemp("compiling"))))


def test_a_short_run_is_not_compiled_and_the_resolved_recipe_says_so(tiny: Recipe) -> None:
    assert tiny.compile == "auto"
    materials = gather(tiny, world=World(), device=torch.device("cpu"), announce=lambda text: None)
    materials.rows.close()
    assert materials.recipe.compile is False and materials.compiled.why.startswith("compile auto: off, the run is too")


def test_a_run_that_goes_on_keeps_its_choice_unless_another_is_asked_for(tiny: Recipe, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    yaml.save(replace(tiny, compile=True), folder.recipe)
    said: list[str] = []
    assert open_folder(tiny, folder, ranks=1, announce=said.append).recipe.compile is True
    assert not [line for line in said if "compile" in line]
    asked = replace(tiny, compile=False)
    assert open_folder(asked, folder, ranks=1, announce=said.append).recipe.compile is False
    assert [line for line in said if line.startswith("compile: was True, is False")]
    assert resumes(tiny, asked)[1] == []


def test_an_update_in_halves_that_comes_first_is_not_what_is_compiled_for(
    tiny: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes on just before its noise is measured: the one micro-batch of that update is cut in two."""
    from torch._dynamo.utils import counters

    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    counters.clear()
    recipe = replace(tiny, compile=True, monitor=replace(tiny.monitor, noise_steps=2))
    materials = gather(recipe, world=World(), device=torch.device("cpu"), announce=lambda text: None)
    assert materials.micros == 1 and materials.compiled.on
    run, graphs = build(materials), []
    run.step = 1
    for _ in range(3):
        step(run, run.source.take(materials.micros))
        graphs.append(counters["stats"]["unique_graphs"])
    run.source.close()
    torch._dynamo.reset()
    assert graphs == [0, 1, 1]
    assert [line for line in run.compute.noted if "ready after" in line]
