"""Each illness of a run, provoked in a real one, is told with its likely cause, and with no other."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from danlu.monitor.causes import REMEDIES, Likely
from tests.fault import runs
from tests.fault.test_not_finite import Poison
from tests.fault.test_spikes import Harm


def named(recipe: Path) -> set[str]:
    """Every likely cause that the run's events and what it said name."""
    events = {event["likely"] for event in runs.events(recipe) if "likely" in event}
    return events | set(re.findall(r"Likely cause: ([^.]+)\.", runs.said(recipe)))


def told(recipe: Path, likely: Likely) -> None:
    """Each of them comes with its remedy, in the events and to whoever watches."""
    for event in runs.events(recipe):
        if "likely" in event and "remedy" in event:
            assert event["remedy"] == REMEDIES[Likely(event["likely"])]
    assert f"Likely cause: {likely}. {REMEDIES[likely]}" in runs.said(recipe)


@dataclass(frozen=True)
class Labels:
    """No token is asked."""

    def __call__(self) -> None:
        import torch

        from danlu.core.batch import IGNORE
        from danlu.data.source import Rows

        take = Rows.take
        masked = lambda batch: replace(batch, labels=torch.full_like(batch.labels, IGNORE))  # noqa: E731
        Rows.take = lambda rows, micros: [masked(batch) for batch in take(rows, micros)]  # type: ignore[method-assign]


@dataclass(frozen=True)
class Frozen:
    """Only the last norm is trained."""

    def __call__(self) -> None:
        from danlu.train import assemble

        fill = assemble.fill

        def frozen(model: Any, seed: int) -> None:
            fill(model, seed)
            for name, weight in model.named_parameters():
                weight.requires_grad_(name == "norm.weight")

        assemble.fill = frozen


@dataclass(frozen=True)
class InOrder:
    """Samples come as they stand in the text."""

    def __call__(self) -> None:
        from danlu.data.order import Permutation

        Permutation.__getitem__ = lambda order, index: index  # type: ignore[method-assign]


@dataclass(frozen=True)
class Cut:
    """What block 1 gives is used, but no gradient comes back through it."""

    def __call__(self) -> None:
        from danlu.models.stack import Block

        forward = Block.forward

        def cut(block: Any, hidden: Any, *more: Any) -> Any:
            out = forward(block, hidden, *more)
            return hidden + (out - hidden).detach() if block.layer == 1 else out

        made = Block.__init__

        def init(block: Any, shape: Any, *, layer: int) -> None:
            made(block, shape, layer=layer)
            block.layer = layer

        Block.forward, Block.__init__ = cut, init  # type: ignore[method-assign]


CASES: list[tuple[Likely | None, int, Callable[[], None] | None, tuple[str, ...]]] = [
    (None, 0, None, ()),
    (Likely.RATE, -1, None, ("optimizer.learning_rate=1.0",)),
    (Likely.LABELS, 3, Labels(), ()),
    (Likely.FROZEN, 0, None, ("optimizer.learning_rate=0",)),
    (Likely.FROZEN, 0, Frozen(), ("monitor.plateau_steps=32", "monitor.layers=null")),
    (Likely.DATA, 0, InOrder(), ()),
    (Likely.DATA, 0, Harm(first=45, last=45, foreign=True), ()),
    (Likely.OVERFLOW, 3, Poison("gradient", math.inf, tuple(range(5, 99))), ("memory.precision=fp16",)),
    (Likely.LAYER, 0, Cut(), ("monitor.layers.steps=5",)),
]


@pytest.mark.parametrize(("likely", "code", "prepare", "words"), CASES)
def test_the_cause_is_named_and_no_other(
    tmp_path: Path, likely: Likely | None, code: int, prepare: Any, words: tuple[str, ...]
) -> None:
    recipe = runs.write_recipe(tmp_path, steps=60)
    words = (*words, "checkpoint.save_steps=20", "evaluate.eval_steps=30", "checkpoint.keep_best=0", "compile=false")
    ended = runs.finish(recipe, *words, prepare=prepare)
    assert ended == code or (code < 0 and ended in (0, 3)), runs.said(recipe)
    assert named(recipe) == ({str(likely)} if likely else set()), runs.said(recipe)
    if likely:
        told(recipe, likely)


def test_a_text_of_a_few_rows_comes_again_and_again(tmp_path: Path) -> None:
    recipe = runs.write_recipe(tmp_path, steps=20)
    (tmp_path / "lines.txt").write_text("\n".join(["abcdefg hijk"] * 16))
    assert runs.finish(recipe, "data.validation=0", "evaluate.eval_steps=100", "compile=false") == 0, runs.said(recipe)
    assert named(recipe) == {str(Likely.DATA)}
    assert [event["event"] for event in runs.events(recipe) if "likely" in event] == ["repeated"]
