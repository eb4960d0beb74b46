"""`danlu recipes` lists, prints, and names every setting."""

from __future__ import annotations

import pytest

from danlu.cli.main import main
from danlu.core.fields import walk
from danlu.recipe.recipe import Recipe
from danlu.recipe.shelf import shipped


def test_each_shipped_recipe_is_listed_with_its_caption(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines[: len(shipped())]} == set(shipped())
    assert lines[0].startswith("shakespeare  The first run: ")


def test_a_recipe_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "tiny"]) == 0
    assert capsys.readouterr().out == shipped()["tiny"].read_text()


def test_every_setting_is_named_with_its_doc(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--fields"]) == 0
    out = capsys.readouterr().out
    for place in walk(Recipe):
        assert place.name in out
        if place.setting.facts.doc:
            assert place.setting.facts.doc.split()[0] in out


def test_one_section_s_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "optimizer.schedule", "--fields"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("optimizer(adamw).schedule ")
    assert any(line.startswith("optimizer.schedule(linear).final_ratio ") for line in lines)
    assert not any("weight_decay" in line for line in lines)
    assert main(["recipes", "optimiser", "--fields"]) == 2


def test_every_setting_of_a_recipe_has_a_doc() -> None:
    bare = [place.path for place in walk(Recipe) if not place.setting.facts.doc and place.name != "kind"]
    assert not bare
