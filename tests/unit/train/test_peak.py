"""Forecast and measurement stand in a run's records, side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from danlu.core.world import World
from danlu.memory.ledger import forecast
from danlu.memory.tracker import Tracker
from danlu.recipe.yaml import load
from danlu.train.assemble import build, gather
from danlu.train.loop import train
from danlu.train.step import step
from tests.equal.curves import write_recipe
from tests.ranks import Ranks


def test_the_second_update_is_measured(tmp_path: Path) -> None:
    recipe = load(str(write_recipe(tmp_path)), ["memory.precision=fp32", "data.validation=0", "monitor.console=false"])
    folder = train(recipe)
    environment = json.loads(folder.environment.read_text())["memory"]
    parts = environment["forecast_parts"]
    assert sum(parts.values()) == environment["forecast_bytes"]
    assert [block["recompute"] for block in environment["blocks"]] == ["none", "none"]
    assert sum(block["kept_bytes"] for block in environment["blocks"]) <= parts["activations"]
    assert {"weights", "moments", "gradients", "activations", "head", "batch"} <= parts.keys()
    events = [json.loads(line) for line in (folder.root / "events.jsonl").read_text().splitlines()]
    (told,) = [event for event in events if event["event"] == "memory"]
    assert told["step"] == 2 and told["resident_bytes"] > told["held_bytes"]
    assert told["held_bytes"] == pytest.approx(told["forecast_bytes"], rel=0.05)
    assert sum(told["held_parts"].values()) == told["held_bytes"]
    assert {"weights", "moments", "blocks.0", "blocks.1"} <= told["held_parts"].keys()
    lines = [json.loads(line) for line in (folder.root / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "memory_held_bytes" in line] == [2]
    assert lines[1]["memory_held_bytes"] == told["held_bytes"]


@pytest.mark.parametrize(
    ("given", "looked_at"),
    [
        (["batch.ramp={from: 4, steps: 3}", "max_steps=5"], 4),  # 4 rows until update 3, then 8
        (["monitor.noise_steps=2"], 3),  # the second is run in halves
        (["monitor.noise_steps=2", "batch.micro_batch_size=4"], 2),
        (["monitor.noise_steps=1"], 2),  # all are in halves
    ],
    ids=str,
)
def test_an_update_that_is_smaller_than_the_forecast_ones_is_not_looked_at(
    tmp_path: Path, given: list[str], looked_at: int
) -> None:
    quiet = ["memory.precision=fp32", "data.validation=0", "monitor.console=false", "monitor.curve=false"]
    folder = train(load(str(write_recipe(tmp_path)), [*quiet, *given]))
    events = [json.loads(line) for line in (folder.root / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "memory"] == [looked_at]


def tracked(world: World, recipe: str, overrides: list[str]) -> tuple[int, int]:
    """Forecast and tracked peak of the second update on one rank."""
    import torch

    materials = gather(load(recipe, overrides), world=world, device=torch.device("cpu"), announce=lambda text: None)
    run = build(materials)
    step(run, run.source.take(materials.micros))
    batches = run.source.take(materials.micros)
    with Tracker() as tracker:
        tracker.hold("weights", run.weights.values())
        tracker.hold("moments", run.optim.state().values())
        for batch in batches:
            tracker.hold("batch", [batch.tokens, batch.labels, batch.positions, batch.documents])
        step(run, batches)
    run.source.close()
    return forecast(materials.case).peak, tracker.peak


WIDE = ["model.hidden_size=128", "model.intermediate_size=384", "data.sequence_length=64", "batch.global_batch_size=16"]


@pytest.mark.parametrize(
    "plan",
    [
        ["batch.micro_batch_size=8"],
        ["batch.micro_batch_size=4", "parallel.zero=2"],
        ["batch.micro_batch_size=8", "parallel.shard=1", "parallel.replicate=2"],
    ],
    ids=" ".join,
)
def test_two_ranks(ranks: Ranks, tmp_path: Path, plan: list[str]) -> None:
    """Buffers of what travels are forecast as if all were full at once, so rather too much than too little."""
    recipe = str(write_recipe(tmp_path))
    for need, held in ranks.run(tracked, recipe, ["memory.precision=fp32", *WIDE, *plan], size=2):
        assert 0.95 * held <= need <= 1.15 * held
