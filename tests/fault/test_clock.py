"""The clock jumps by days, forwards and back, at every look: nothing that a run does depends on it."""

from __future__ import annotations

import json
import os
import random
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from tests.fault import runs

DAY = 86_400


@dataclass(frozen=True)
class Jumps:
    """Every look at the clock that people read shows another day; durations go by another one."""

    seed: int
    looks: Path

    def __call__(self) -> None:
        """The process is prepared."""
        from danlu.monitor import books

        chance, now = random.Random(self.seed), time.time

        def jumping() -> float:
            self.looks.touch()
            return now() + chance.uniform(-DAY, DAY)

        class Jumping(datetime):
            @classmethod
            def now(cls, zone: Any = None) -> Any:
                return datetime.now(zone) + timedelta(seconds=chance.uniform(-DAY, DAY))

        time.time = jumping
        books.datetime = Jumping  # type: ignore[attr-defined, misc]


def test_a_run_whose_clock_jumps_is_the_same_and_its_figures_are_sane(tmp_path: Path) -> None:
    still, recipe = runs.write_recipe(tmp_path / "still", steps=12), runs.write_recipe(tmp_path / "jumps", steps=12)
    board = "monitor.tensorboard=true"  # it looks at the clock, too
    assert runs.finish(still, board) == 0, runs.said(still)
    looks = tmp_path / "looks"
    begun = time.monotonic()
    assert runs.finish(recipe, board, prepare=Jumps(1, looks)) == 0, runs.said(recipe)
    seconds = time.monotonic() - begun
    assert looks.exists()
    runs.same(recipe, still)
    for line in map(json.loads, (runs.folder(recipe) / "metrics.jsonl").read_text().splitlines()):
        for name, value in line.items():
            if "seconds" in name:
                assert 0 <= value <= seconds, (line["step"], name, value)
            if name == "tokens_per_second":
                assert 0 < value < 1e8, line["step"]
    times = {event["time"][:10] for event in runs.events(recipe)}
    assert len(times) > 1, "the events' clock did not jump"


def test_checkpoints_go_by_their_step_and_not_by_their_time(tmp_path: Path) -> None:
    recipe = runs.write_recipe(tmp_path, steps=9)
    assert runs.finish(recipe) == 0, runs.said(recipe)
    checkpoints = runs.folder(recipe) / "checkpoints"
    steps = sorted(path.name for path in checkpoints.iterdir())
    far = datetime(2099, 1, 1, tzinfo=UTC).timestamp()
    for number, path in enumerate([*checkpoints.iterdir(), *checkpoints.glob("*/*")]):
        os.utime(path, (far - number * DAY, far - number * DAY if path.name == steps[0] else 0))
    assert runs.finish(recipe, "max_steps=12", prepare=Jumps(2, tmp_path / "looks")) == 0, runs.said(recipe)
    assert [event["checkpoint"] for event in runs.events(recipe, "resumed")] == ["step-000009"]
    left = sorted(path.name for path in checkpoints.iterdir())
    assert {"step-000009", "step-000012"} <= set(left) and len(left) <= 3
