"""A deterministic run: the same bits twice, and a refusal of what could give others."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.fault import runs

ASKED = "deterministic=true"


def test_two_runs_are_the_same_to_the_bit_and_say_so(tmp_path: Path) -> None:
    one, other = (runs.write_recipe(tmp_path / name, steps=6) for name in ("one", "other"))
    for recipe in (one, other):
        assert runs.finish(recipe, ASKED) == 0, runs.said(recipe)
        facts = json.loads((runs.folder(recipe) / "environment.json").read_text())
        assert facts["deterministic"] is True and facts["variables"]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert facts["roles"]["attention"] == {"stored": "fp32", "computed": "fp32"} and "update" in facts["roles"]
    runs.same(one, other)
    usual = runs.write_recipe(tmp_path / "usual", steps=3)
    assert runs.finish(usual) == 0
    assert json.loads((runs.folder(usual) / "environment.json").read_text())["deterministic"] is False


class PutsInNoOrder:
    """The model writes to the same place twice, in an order that nobody knows."""

    def __call__(self) -> None:
        from danlu.models.mlp import Mlp

        forward = Mlp.forward

        def other(part: Mlp, hidden: torch.Tensor) -> torch.Tensor:
            torch.zeros(3).put_(torch.tensor([1, 1]), torch.tensor([2.0, 3.0]))
            return forward(part, hidden)

        Mlp.forward = other  # type: ignore[method-assign]


def test_what_has_no_order_is_refused(tmp_path: Path) -> None:
    recipe = runs.write_recipe(tmp_path, steps=3)
    assert runs.finish(recipe, prepare=PutsInNoOrder()) == 0, runs.said(recipe)
    recipe = runs.write_recipe(tmp_path / "again", steps=3)
    assert runs.finish(recipe, ASKED, prepare=PutsInNoOrder()) == 1
    last = runs.said(recipe).splitlines()[-1]
    assert last.startswith("deterministic: true refuses what torch can only do with other bits each time:")
    assert "put_" in last and "in update 1" in last
