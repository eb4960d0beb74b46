"""fp16 overflows on one rank: no rank makes the update, the scale falls on all, and nobody is alarmed in vain."""

from __future__ import annotations

import json
import math
from pathlib import Path

from tests.fault import runs
from tests.fault.test_not_finite import Poison, tensors

FP16 = ("memory.precision=fp16", "monitor.max_unsound_steps=2")


def scales(recipe: Path) -> dict[int, float]:
    """The loss scale of each update."""
    lines = (runs.folder(recipe) / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: line["loss_scale"] for line in map(json.loads, lines)}


def test_overflows_are_skipped_and_halve_the_scale(tmp_path: Path) -> None:
    recipe = runs.write_recipe(tmp_path, steps=8)
    every = ("checkpoint.save_steps=1", "checkpoint.keep_last=-1", "checkpoint.keep_best=0")
    poison = Poison("gradient", math.inf, (3, 4, 5), rank=1)
    assert runs.finish(recipe, *FP16, *every, prepare=poison, ranks=2) == 0, runs.said(recipe)
    assert scales(recipe) == {1: 65536, 2: 65536, 3: 65536, 4: 32768, 5: 16384, 6: 8192, 7: 8192, 8: 8192}
    assert [line["step"] for line in runs.metrics(recipe) if not line["sound"]] == [3, 4, 5]
    overflows = runs.events(recipe, "overflow")
    assert [event["step"] for event in overflows] == [3, 4, 5] and not runs.events(recipe, "skipped")
    assert overflows[0]["cause"] == "Step 3 was skipped: fp16 overflowed at a loss scale of 65536, which is halved."
    assert runs.said(recipe).count("fp16 overflowed") == 3
    for before, after in zip(tensors(recipe, 2), tensors(recipe, 5), strict=True):
        assert all((before[name] == after[name]).all() for name in before)
    for before, after in zip(tensors(recipe, 5), tensors(recipe, 6), strict=True):
        assert any((before[name] != after[name]).any() for name in before)


def test_overflows_at_a_scale_of_one_end_the_run_with_their_remedy(tmp_path: Path) -> None:
    recipe = runs.write_recipe(tmp_path, steps=20)
    poison = Poison("gradient", math.inf, tuple(range(4, 99)))
    assert runs.finish(recipe, *FP16, "memory.loss_scale.start=4", prepare=poison) == 3, runs.said(recipe)
    assert scales(recipe) == {1: 4, 2: 4, 3: 4, 4: 4, 5: 2, 6: 1, 7: 1}
    assert [event["step"] for event in runs.events(recipe, "overflow")] == [4, 5]
    assert [event["step"] for event in runs.events(recipe, "skipped")] == [6, 7]
    last = runs.said(recipe).splitlines()[-1]
    assert "Stopped at step 7: 2 updates in a row were skipped" in last
    assert "fp16 overflow" in last and "memory.precision: bf16" in last


def test_a_loss_that_is_not_finite_is_no_matter_of_the_scale(tmp_path: Path) -> None:
    recipe = runs.write_recipe(tmp_path, steps=9)
    poison = Poison("loss", math.nan, (4, 5, 6))
    assert runs.finish(recipe, *FP16, prepare=poison) == 3, runs.said(recipe)
    assert not runs.events(recipe, "overflow")
    assert [event["step"] for event in runs.events(recipe, "skipped")] == [4, 5]


def test_a_killed_run_goes_on_with_the_scale_it_had(tmp_path: Path) -> None:
    """A kill after the overflows: what the resumed run comes to is what the run that was never killed comes to."""
    plan = (*FP16, "memory.loss_scale={start: 1024, growth_interval: 4}")
    whole, killed = (runs.write_recipe(tmp_path / name, steps=12) for name in ("whole", "killed"))
    poison = Poison("gradient", math.inf, (2, 3))
    assert runs.finish(whole, *plan, prepare=poison) == 0, runs.said(whole)
    assert runs.finish(killed, *plan, prepare=Both(poison, runs.Moment("danlu.train.loop", "step", number=9))) == -9
    assert runs.finish(killed, *plan) == 0, runs.said(killed)
    assert scales(killed) == scales(whole) == {
        1: 1024, 2: 1024, 3: 512, **dict.fromkeys(range(4, 8), 256), **dict.fromkeys(range(8, 12), 512), 12: 1024
    }  # fmt: skip
    runs.same(killed, whole)


class Both:
    """A process is prepared by the one and the other."""

    def __init__(self, *parts: runs.Prepare) -> None:
        self.parts = parts

    def __call__(self) -> None:
        for part in self.parts:
            part()
