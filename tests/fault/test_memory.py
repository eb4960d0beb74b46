"""Memory runs out: said in one sentence with the forecast and what would do, and the last checkpoint stands.

A micro-batch that is to be found is tried first, and nothing of the run moves by it.
"""

from __future__ import annotations

import ctypes
import re
import resource
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from danlu.recipe import yaml
from tests.fault import runs

M_ARENA_MAX = -8  # glibc's malloc.h


@dataclass(frozen=True)
class Squeeze:
    """Before the first update the process may map only so many bytes more; or it may from its start."""

    bytes: int
    at_once: bool = False

    def __call__(self) -> None:
        """The process is prepared."""
        from danlu.train import loop

        def limit() -> None:
            most = psutil.Process().memory_info().vms + self.bytes
            resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))

        if self.at_once:
            ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)  # or each thread sets aside 64 MB of what may be mapped
            limit()
            return
        step, begun = loop.step, []

        def squeezed(*arguments: object) -> object:
            if not begun:
                begun.append(True)
                limit()
            return step(*arguments)

        loop.step = squeezed


@dataclass(frozen=True)
class Refuse:
    """torch raises what it raises where a GPU's memory has run out: in the training update of that number, or in the
    trial of a micro-batch of more rows than that."""

    update: int = 0
    rows: int = 0

    def __call__(self) -> None:
        """The process is prepared."""
        import torch

        from danlu.train import loop, trial

        refused = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        step, worst, calls = loop.step, trial.worst, []

        def refuses(*arguments: object) -> object:
            calls.append(1)
            if len(calls) == self.update:
                raise refused
            return step(*arguments)

        def tried(materials: trial.Materials) -> int:
            if materials.case.rows > self.rows:
                raise refused
            return worst(materials)

        if self.update:
            loop.step = refuses
        if self.rows:
            trial.AMPLE, trial.worst = float("inf"), tried


def test_it_is_said_once_and_the_checkpoint_stands(tmp_path: Path) -> None:
    whole, broken = runs.write_recipe(tmp_path / "whole"), runs.write_recipe(tmp_path / "broken")
    plan = ["max_steps=8"]
    assert runs.finish(whole, *plan, "batch.micro_batch_size=4") == 0
    assert runs.finish(broken, *plan, "batch.micro_batch_size=4", prepare=Refuse(update=5)) == 1
    said = runs.said(broken)
    last = said.strip().splitlines()[-1]
    assert last.startswith("out of memory in update 5: about "), said
    for part in ("weights", "gradients", "moments", "activations", "head"):
        assert re.search(rf"\b{part} [0-9.]+ (bytes|kB|MB)", last), part
    assert "batch.micro_batch_size=2 (" in last and "memory.recompute=selective (" in last
    assert "memory.recompute=full (" in last and "Traceback" not in said
    assert [path.name for path in sorted((runs.folder(broken) / "checkpoints").glob("step-*"))] == ["step-000003"]
    assert runs.finish(broken, *plan, "batch.micro_batch_size=4", "memory.recompute=full") == 0
    runs.same(broken, whole)
    assert "memory.recompute: was none, is full from here on" in runs.said(broken)


BIG = ["model.hidden_size=128", "model.num_hidden_layers=4", "batch.global_batch_size=128", "max_steps=4"]


def test_a_limit_of_the_process_is_met_and_told(tmp_path: Path) -> None:
    """The updates need some 100 MB of activations, and 20 may be had."""
    recipe = runs.write_recipe(tmp_path)
    assert runs.finish(recipe, *BIG, "batch.micro_batch_size=128", prepare=Squeeze(20_000_000)) == 1
    last = runs.said(recipe).strip().splitlines()[-1]
    assert last.startswith("out of memory in update 1: about ") and "can't allocate memory" in last
    assert runs.finish(recipe, *BIG, "batch.micro_batch_size=128") == 0


def test_a_micro_batch_is_found_within_a_limit(tmp_path: Path) -> None:
    recipe = runs.write_recipe(tmp_path)
    code = runs.finish(recipe, *BIG, "batch.micro_batch_size=auto", prepare=Squeeze(200_000_000, at_once=True))
    said = runs.said(recipe)
    assert code == 0, said
    assert re.search(r"batch\.micro_batch_size: \d+; .* held at most, .* forecast, of .* free; tried in", said), said
    assert (
        f"batch.micro_batch_size: {yaml.load(str(runs.folder(recipe) / 'recipe.yaml')).batch.micro_batch_size};" in said
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_next_smaller_divisor_is_tried_and_nothing_moves_by_it(tmp_path: Path, ranks: int) -> None:
    given, found = runs.write_recipe(tmp_path / "given", steps=4), runs.write_recipe(tmp_path / "found", steps=4)
    assert runs.finish(given, "batch.micro_batch_size=2", ranks=ranks) == 0
    code = runs.finish(found, "batch.micro_batch_size=auto", prepare=Refuse(rows=2), ranks=ranks)
    said = runs.said(found)
    if ranks > 1:
        assert code == 1 and "while batch.micro_batch_size was tried" in said and "batch.micro_batch_size=2" in said
        return
    assert code == 0, said
    for size in (8, 4):
        assert f"batch.micro_batch_size: {size} does not fit (memory ran out; tried in" in said
    assert "batch.micro_batch_size: 2; " in said
    assert yaml.load(str(runs.folder(found) / "recipe.yaml")).batch.micro_batch_size == 2
    runs.same(found, given)
