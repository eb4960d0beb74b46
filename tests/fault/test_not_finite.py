"""A number that is not finite, on one rank only: no rank makes the update; too many in a row end the run."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.fault import runs


@dataclass(frozen=True)
class Poison:
    """On one rank, the loss or one number of one gradient is `value` in these updates of the process."""

    where: str  # loss | gradient
    value: float
    updates: tuple[int, ...]
    rank: int = 0

    def __call__(self) -> None:
        """The process is prepared."""
        from torch.distributed.tensor import DTensor

        from danlu.compute.layer import ComputeLayer

        if int(os.environ.get("RANK", "0")) != self.rank:
            return
        work, norm, update = ComputeLayer.forward_backward, ComputeLayer.norm, 0

        def forward_backward(layer: ComputeLayer, micros: Any, loss: Any) -> Any:
            nonlocal update
            update += 1

            def poisoned(out: Any, batch: Any) -> Any:
                total, terms = loss(out, batch)
                if self.where == "loss" and update in self.updates:
                    total = total * self.value
                    terms = type(terms)({name: term * self.value for name, term in terms.items()})
                return total, terms

            return work(layer, micros, poisoned)

        def norm_of(layer: ComputeLayer, parameters: Any) -> Any:
            parameters = list(parameters)
            if self.where == "gradient" and update in self.updates:
                gradient = parameters[3].grad
                (gradient.to_local() if isinstance(gradient, DTensor) else gradient).view(-1)[0] = self.value
            return norm(layer, parameters)

        ComputeLayer.forward_backward, ComputeLayer.norm = forward_backward, norm_of  # type: ignore


def tensors(recipe: Path, step: int) -> list[dict[str, torch.Tensor]]:
    """What each rank saved after a step, but for its random stream."""
    found = sorted((runs.folder(recipe) / "checkpoints" / f"step-{step:06d}").glob("*.safetensors"))
    assert found
    return [{n: t for n, t in load_file(path).items() if n.startswith(("weights/", "optimizer/"))} for path in found]


CASES = [
    (1, Poison("loss", math.nan, (5,))),
    (1, Poison("gradient", math.inf, (5,))),
    (2, Poison("loss", math.nan, (5,), rank=1)),
    (2, Poison("loss", math.inf, (5,), rank=0)),
    (2, Poison("gradient", math.nan, (5,), rank=1)),
    (2, Poison("gradient", -math.inf, (5,), rank=1)),
]


@pytest.mark.parametrize(
    ("ranks", "poison"), CASES, ids=lambda g: str(g) if isinstance(g, int) else f"{g.where}-{g.value}"
)
def test_the_update_is_skipped_on_every_rank(tmp_path: Path, ranks: int, poison: Poison) -> None:
    recipe = runs.write_recipe(tmp_path, steps=7)
    every = ("checkpoint.save_steps=1", "checkpoint.keep_last=-1", "checkpoint.keep_best=0")
    assert runs.finish(recipe, *every, prepare=poison, ranks=ranks) == 0, runs.said(recipe)

    before, at, after = (tensors(recipe, step) for step in (4, 5, 6))
    assert len(before) == ranks
    for rank in range(ranks):
        assert before[rank].keys() == at[rank].keys() and len(before[rank]) > 40
        assert all(torch.equal(before[rank][name], at[rank][name]) for name in before[rank])
        moved = [
            name
            for name in at[rank]
            if name.startswith("weights/") and not torch.equal(at[rank][name], after[rank][name])
        ]
        assert len(moved) > 10
        assert all(tensor.isfinite().all() for tensor in after[rank].values())

    lines = {line["step"]: line for line in runs.metrics(recipe)}
    assert [step for step, line in lines.items() if not line["sound"]] == [5]
    assert ("loss" in lines[5]) is (poison.where == "gradient")  # what is not finite is absent, not written as a number
    assert "grad_norm" not in lines[5]

    [skipped] = runs.events(recipe, "skipped")
    assert skipped["step"] == 5
    read = runs.samples(recipe)
    assert skipped["samples"] == [sample for rank in range(ranks) for sample in read[rank, 4 * 8]]
    assert runs.said(recipe).count("Step 5 was skipped") == 1


def test_after_so_many_in_a_row_the_run_stops_in_good_order(tmp_path: Path) -> None:
    recipe = runs.write_recipe(tmp_path)
    poison = Poison("gradient", math.nan, tuple(range(8, 99)), rank=1)
    assert runs.finish(recipe, "monitor.max_unsound_steps=3", prepare=poison, ranks=2) == 3
    said = runs.said(recipe)
    last = said.splitlines()[-1]
    assert "Stopped at step 10: 3 updates in a row were skipped" in last and said.count("Stopped at step 10") == 1
    assert re.search(r"the last good checkpoint is \S+/step-00000[69]\.", last)  # that of step 9 may just be on its way
    assert last.endswith("The run is saved after update 10, with the weights that were good.")
    assert [line["step"] for line in runs.metrics(recipe) if not line["sound"]] == [8, 9, 10]
    # What was saved at the stop is what the last sound update left, so the same command goes on from good weights.
    runs.forget_said(recipe)
    assert runs.finish(recipe, ranks=2) == 0, runs.said(recipe)
    assert [event["checkpoint"] for event in runs.events(recipe, "resumed")] == ["step-000010"]
    lines = runs.metrics(recipe)
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert all(line["sound"] for line in lines[10:]) and lines[-1]["eval_loss"] < 2


def test_the_count_in_a_row_starts_again_after_a_sound_update(tmp_path: Path) -> None:
    recipe = runs.write_recipe(tmp_path, steps=12)
    poison = Poison("loss", math.nan, (2, 3, 5, 6, 8, 9))
    assert runs.finish(recipe, "monitor.max_unsound_steps=3", prepare=poison) == 0, runs.said(recipe)
    assert [line["step"] for line in runs.metrics(recipe) if not line["sound"]] == [2, 3, 5, 6, 8, 9]
