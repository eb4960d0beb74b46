"""Losses far above the usual: single updates are skipped, hurt weights are gone back from; all survives a kill."""

from __future__ import annotations

import json
import math
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.fault import runs
from tests.fault.runs import Moment

BATCH = 8  # rows of an update, as the recipe says
STEPS = 44
HURT = 27  # the update, of a run that never went back, after which all is bad


@dataclass(frozen=True)
class Harm:
    """What certain samples of the run's order do, whenever they are read: so it comes again after a resume, and not
    once they are passed over.

    scaled   their loss and gradients are so many times what they should be
    foreign  every byte of them is another one
    shaken   after each update that read them every weight is moved by so much, this way or that
    blown    after the update that read them every weight is so many times what it was
    first, last   the updates, counted from 1, that would read them in a run that never went back
    """

    first: int
    last: int
    scaled: float = 1.0
    blown: float = 1.0
    foreign: bool = False
    shaken: float = 0.0

    def __call__(self) -> None:
        """The process is prepared."""
        import torch

        from danlu.compute.layer import ComputeLayer
        from danlu.data.source import Rows
        from danlu.optim.layer import OptimLayer

        take, work, move = Rows.take, ComputeLayer.forward_backward, OptimLayer.step
        reading = 0

        def taken(rows: Rows, micros: int) -> Any:
            nonlocal reading
            reading = rows.samples // BATCH + 1
            batches = take(rows, micros)
            if not self.foreign or not self.first <= reading <= self.last:
                return batches
            other = lambda ids: torch.where((ids >= 0) & (ids < 256), 255 - ids, ids)  # noqa: E731
            return [replace(each, tokens=other(each.tokens), labels=other(each.labels)) for each in batches]

        def worked(layer: Any, micros: Any, loss: Any, **more: Any) -> Any:
            def scaled(out: Any, batch: Any) -> Any:
                total, terms = loss(out, batch)
                if self.first <= reading <= self.last:
                    total = total * self.scaled
                    terms = type(terms)({name: term * self.scaled for name, term in terms.items()})
                return total, terms

            return work(layer, micros, scaled, **more)

        def moved(layer: Any, update: int) -> None:
            move(layer, update)
            if self.first <= reading <= self.last:
                chance = torch.Generator().manual_seed(reading)
                with torch.no_grad():
                    for weight in layer.weights.values():
                        weight.mul_(self.blown)
                        if self.shaken:
                            weight.add_(torch.randn(weight.shape, generator=chance), alpha=self.shaken)

        Rows.take, ComputeLayer.forward_backward, OptimLayer.step = taken, worked, moved  # type: ignore


BLOWN = Harm(first=HURT, last=HURT, blown=4.0)


def recipe(folder: Path) -> Path:
    return runs.write_recipe(folder, steps=STEPS)


def aside(recipe: Path) -> dict[str, list[dict[str, Any]]]:
    """The lines set aside, by their file."""
    files = sorted((runs.folder(recipe) / "rolled-back").glob("*.jsonl"))
    return {path.name: [json.loads(line) for line in path.read_text().splitlines()] for path in files}


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_spike_is_skipped_on_every_rank(tmp_path: Path, ranks: int) -> None:
    here = recipe(tmp_path)
    assert runs.finish(here, prepare=Harm(first=30, last=30, scaled=50.0), ranks=ranks) == 0, runs.said(here)
    lines = {line["step"]: line for line in runs.metrics(here)}
    assert sorted(lines) == list(range(1, STEPS + 1))
    assert [step for step, line in lines.items() if not line["sound"]] == [30]
    assert lines[30]["loss"] > 10 * lines[29]["loss"] and lines[31]["loss"] < 1.5 * lines[29]["loss"]
    [skipped] = runs.events(here, "skipped")
    read = runs.samples(here)
    assert skipped["samples"] == [sample for rank in range(ranks) for sample in read[rank, 29 * BATCH]]
    [over] = runs.events(here, "spike_over")
    assert over["likely"] == "data or their order"
    assert not runs.events(here, "rolled_back")


@pytest.mark.parametrize("ranks", [1, 2])
def test_hurt_weights_are_gone_back_from(tmp_path: Path, ranks: int) -> None:
    here = recipe(tmp_path)
    assert runs.finish(here, prepare=BLOWN, ranks=ranks) == 0, runs.said(here)
    [back] = runs.events(here, "rolled_back")
    assert back["to"] == 24 and back["from"] in range(HURT + 1, HURT + 8)
    assert back["likely"] == "rate too high" and back["samples"]
    assert back["positions"] == [24 * BATCH, back["from"] * BATCH]
    lines = runs.metrics(here)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1)) and all(line["sound"] for line in lines)
    assert max(line["loss"] for line in lines[24:]) < 2 * lines[23]["loss"]
    # What the run went back behind is kept, and what it read then is not read again.
    [(name, dropped)] = aside(here).items()
    assert name == f"001-step-{back['from']:06d}-to-000024.jsonl"
    assert [line["step"] for line in dropped] == list(range(25, back["from"] + 1))
    read = {at for _, at in runs.samples(here)}
    assert read == {BATCH * n for n in range(STEPS + back["from"] - 24)}
    assert "Went back from step" in runs.said(here)


def test_a_run_of_epochs_that_went_back_still_has_data_to_its_end(tmp_path: Path) -> None:
    here = recipe(tmp_path)
    assert runs.finish(here, "max_steps=null", "num_train_epochs=1", prepare=BLOWN) == 0, runs.said(here)
    [back] = runs.events(here, "rolled_back")
    lines = runs.metrics(here)
    assert [line["step"] for line in lines] == list(range(1, lines[-1]["step"] + 1))
    assert all(line["sound"] and line["loss"] > 0 for line in lines) and not runs.events(here, "unlabelled")
    assert max(at for _, at in runs.samples(here)) == BATCH * (lines[-1]["step"] - 1 + back["from"] - back["to"])


def test_a_slow_divergence_is_gone_back_from(tmp_path: Path) -> None:
    here = runs.write_recipe(tmp_path, steps=130)
    slow = Harm(first=50, last=110, shaken=0.03)
    assert runs.finish(here, "checkpoint.keep_last=-1", prepare=slow) == 0, runs.said(here)
    [back] = runs.events(here, "rolled_back")
    assert back["to"] <= 48 and 80 <= back["from"] <= 112 and "diverges" in back["cause"]
    assert back["likely"] == "rate too high"
    assert runs.metrics(here)[-1]["loss"] < 1.0


def test_a_run_killed_while_it_goes_back_ends_like_one_that_was_not(tmp_path: Path) -> None:
    unhurt = recipe(tmp_path / "unhurt")
    assert runs.finish(unhurt, prepare=BLOWN) == 0, runs.said(unhurt)
    here = recipe(tmp_path / "hurt")
    moments = [
        Moment("danlu.train.loop", "last_good"),
        Moment("danlu.train.loop", "go_back"),
        Moment("danlu.train.retreat", "restore"),
        Moment("danlu.monitor.watch", "Watch.set_aside"),
        Moment("danlu.checkpoint.save", "Saver.drop_after"),
        Moment("danlu.checkpoint.folder", "remove_checkpoint"),
        Moment("danlu.train.loop", "Loop._take_up", 2),
        Moment("danlu.checkpoint.commit", "commit", 2),
        Moment("danlu.monitor.watch", "Watch.went_back"),
        Moment("danlu.monitor.books", "Books.go_back"),
        Moment("danlu.monitor.jsonl", "cut", 2),
    ]
    for moment in moments:
        code = runs.finish(here, prepare=Both(BLOWN, moment))
        assert code in (-9, 0), runs.said(here)
    assert runs.finish(here, prepare=BLOWN) == 0, runs.said(here)
    runs.same(here, unhurt)
    assert len(runs.events(here, "rolled_back")) == 1
    assert aside(here).keys() == aside(unhurt).keys()


def test_a_run_told_to_leave_just_then_goes_back_when_it_goes_on(tmp_path: Path) -> None:
    unhurt = recipe(tmp_path / "unhurt")
    assert runs.finish(unhurt, prepare=BLOWN) == 0, runs.said(unhurt)
    here = recipe(tmp_path / "told")
    told = Moment("danlu.monitor.spikes", "Trouble", signal=signal.SIGTERM)
    assert runs.finish(here, prepare=Both(BLOWN, told)) == 75, runs.said(here)
    assert not runs.events(here, "rolled_back")
    assert runs.finish(here, prepare=BLOWN) == 0, runs.said(here)
    runs.same(here, unhurt)
    timeless = [{**event, "time": ""} for at in (here, unhurt) for event in runs.events(at, "rolled_back")]
    assert len(timeless) == 2 and timeless[0] == timeless[1]


def test_a_run_that_left_before_it_goes_back_to_where_one_goes_that_did_not(tmp_path: Path) -> None:
    """What it saves as it leaves neither pushes out what it would go back to, nor is gone back to."""
    words = ("checkpoint.keep_best=0",)
    unhurt = recipe(tmp_path / "unhurt")
    assert runs.finish(unhurt, *words, prepare=BLOWN) == 0, runs.said(unhurt)
    here = recipe(tmp_path / "told")
    for updates in (25, 1, 2):  # after 25, 26 and 28 updates, of which those of 24 and 27 are saved besides
        told = Moment("danlu.train.loop", "step", updates, signal=signal.SIGTERM)
        assert runs.finish(here, *words, prepare=Both(BLOWN, told)) == 75, runs.said(here)
    kept = sorted(path.name for path in (runs.folder(here) / "checkpoints").glob("step-*"))
    assert kept == ["step-000024", "step-000027", "step-000028"]
    assert runs.finish(here, *words, prepare=BLOWN) == 0, runs.said(here)
    runs.same(here, unhurt)
    timeless = [{**event, "time": ""} for at in (here, unhurt) for event in runs.events(at, "rolled_back")]
    assert len(timeless) == 2 and timeless[0] == timeless[1] and timeless[0]["to"] == 24
    names = [[path.name for path in sorted((runs.folder(at) / "checkpoints").iterdir())] for at in (here, unhurt)]
    assert names[0] == names[1]


@dataclass(frozen=True)
class Both:
    """One thing is prepared, then another."""

    first: Any
    second: Any

    def __call__(self) -> None:
        self.first()
        self.second()


def test_a_run_that_went_back_too_often_stops_and_says_why(tmp_path: Path) -> None:
    here = recipe(tmp_path)
    always = Harm(first=HURT, last=10**6, blown=4.0)
    assert runs.finish(here, "monitor.spikes.max_rollbacks=1", prepare=always) == 3
    last = runs.said(here).splitlines()[-1]
    assert last.startswith("Stopped at step ") and "Likely cause: rate too high." in last
    assert "The run went back 1 times before, and may not again" in last
    assert len(runs.events(here, "rolled_back")) == 1
    [stopped] = runs.events(here, "stopped")
    assert stopped["cause"] == last


def test_samples_that_every_weight_finds_hard_are_blamed_and_borne(tmp_path: Path) -> None:
    """From one update on all is other text: going back does not help, and the run says so and learns it."""
    here = recipe(tmp_path)
    other = Harm(first=HURT, last=10**6, foreign=True)
    assert runs.finish(here, "monitor.spikes.max_rollbacks=1", prepare=other) == 0, runs.said(here)
    [back] = runs.events(here, "rolled_back")
    assert back["likely"] == "data or their order"
    [borne] = runs.events(here, "borne")
    assert borne["likely"] == "data or their order"
    assert runs.metrics(here)[-1]["sound"] and math.isfinite(runs.metrics(here)[-1]["loss"])


def test_without_spikes_nothing_is_skipped(tmp_path: Path) -> None:
    here = recipe(tmp_path)
    assert runs.finish(here, "monitor.spikes=null", prepare=Harm(first=30, last=30, scaled=50.0)) == 0
    assert all(line["sound"] for line in runs.metrics(here))
