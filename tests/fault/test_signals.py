"""Told to stop at any moment: the step is finished, the run saved once, exit 75; then it goes on to the bit."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fault import runs
from tests.fault.runs import Moment

TERM, INT, USR1, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one process that was left alone."""
    recipe = runs.write_recipe(tmp_path_factory.mktemp("one"))
    assert runs.finish(recipe) == 0, runs.said(recipe)
    return recipe


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same on two ranks."""
    recipe = runs.write_recipe(tmp_path_factory.mktemp("two"))
    assert runs.finish(recipe, ranks=2) == 0, runs.said(recipe)
    return recipe


# One run, told again and again: the moment, counted from where it went on, and the step after which it is saved.
ON_THE_WAY = [
    (Moment("danlu.train.loop", "step", 5, TERM, rank=1), 5),
    (Moment("danlu.compute.layer", "ComputeLayer.norm", 3, INT, rank=0), 8),
    (Moment("danlu.train.measure", "evaluate", 1, USR1, rank=1), 10),  # of step 9: the next step is the last one
    (Moment("danlu.train.loop", "Loop._save", 1, HUP, rank=0), 13),  # of step 12
    (Moment("danlu.checkpoint.commit", "write_part", 1, TERM, rank=1), 16),  # of step 15, in the background
    (Moment("danlu.train.loop", "step", 2, TERM, rank=1), 18),  # an evaluation is due, and is owed
    (Moment("danlu.data.source", "Rows._next", 2, TERM, rank=0), 20),  # waiting for data
    (Moment("danlu.train.loop", "step", 10, INT, rank=0), 30),  # the last one, with the evaluation that ends a run
]


@pytest.mark.parametrize("ranks", [1, 2])
def test_on_the_way(one: Path, two: Path, tmp_path: Path, ranks: int) -> None:
    """Told on one rank, all ranks agree, save once, and leave with 75."""
    recipe = runs.write_recipe(tmp_path)
    for moment, step in ON_THE_WAY:
        told = moment if ranks > 1 else replace(moment, rank=0)
        runs.forget_said(recipe)
        assert runs.finish(recipe, prepare=told, ranks=ranks) == 75, runs.said(recipe)
        *_, saved, stopped = runs.events(recipe, "saved", "stopped")
        assert saved["event"] == "saved" and stopped["event"] == "stopped"
        assert saved["step"] in (range(step, step + 3) if moment.name == "write_part" else [step])
        name = signal.Signals(moment.signal).name if told.rank == 0 else "a signal"
        sentence = f"stopped by {name} after update {saved['step']}, and saved; the same command goes on"
        assert stopped["cause"] == sentence
        assert runs.said(recipe).splitlines().count(sentence) == 1
    assert runs.finish(recipe, ranks=ranks) == 0, runs.said(recipe)
    steps = [event["step"] for event in runs.events(recipe, "saved")]
    again = [step for step in set(steps) if steps.count(step) > 1]
    assert sorted(again) == [18, 30] and len(steps) == len(set(steps)) + 2  # those that were not yet measured
    runs.same(recipe, one if ranks == 1 else two)


STARTING = [Moment("danlu.train.data", "tokenise", 1, TERM), Moment("danlu.train.loop", "rehearse", 1, INT)]


@pytest.mark.parametrize("moment", STARTING, ids=lambda given: given.name)
def test_while_starting_there_is_nothing_to_save(tmp_path: Path, moment: Moment) -> None:
    recipe = runs.write_recipe(tmp_path, steps=3)
    assert runs.finish(recipe, prepare=moment) == 75
    assert f"stopped by {signal.Signals(moment.signal).name} while starting, before any update" in runs.said(recipe)
    assert not list((runs.folder(recipe) / "checkpoints").glob("*"))
    assert runs.finish(recipe) == 0, runs.said(recipe)
    assert [line["step"] for line in runs.metrics(recipe)] == [1, 2, 3]


def test_at_the_end_the_run_is_finished_first(one: Path, tmp_path: Path) -> None:
    recipe = runs.write_recipe(tmp_path)
    assert runs.finish(recipe, prepare=Moment("danlu.train.finish", "publish", 1, TERM)) == 0, runs.said(recipe)
    runs.same(recipe, one)


class Slow:
    """Evaluation takes a minute and says when it has begun."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __call__(self) -> None:
        from danlu.train import measure

        def evaluate(*arguments: object, **named: object) -> None:
            self.mark.touch()
            time.sleep(60)

        measure.evaluate = evaluate  # type: ignore[assignment]


@pytest.mark.parametrize("number", [TERM, INT])
def test_a_second_signal_ends_at_once(tmp_path: Path, number: int) -> None:
    recipe, mark = runs.write_recipe(tmp_path), tmp_path / "evaluates"
    [process] = runs.start(recipe, "checkpoint.keep_best=0", prepare=Slow(mark))
    deadline = time.monotonic() + 60
    while not mark.exists():
        assert time.monotonic() < deadline and process.exitcode is None, runs.said(recipe)
        time.sleep(0.02)
    os.kill(process.pid, number)
    time.sleep(0.3)
    assert process.exitcode is None
    begun = time.monotonic()
    os.kill(process.pid, number)
    process.join(10)
    assert process.exitcode == -number and time.monotonic() - begun < 5
    assert runs.finish(recipe, "checkpoint.keep_best=0") == 0, runs.said(recipe)  # the checkpoint of step 3 is good
    assert [event["checkpoint"] for event in runs.events(recipe, "resumed")] == ["step-000003"]
