"""A whole run with an average of its weights, a growing batch and its noise measured: stopped and gone on with, it is
the run that was never stopped, to the bit; its average is what is measured and published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

import danlu
from danlu.checkpoint.load import Want, newest, read
from danlu.core.errors import InputError
from danlu.core.world import World
from danlu.recipe.yaml import load
from danlu.train.assemble import build, gather
from danlu.train.measure import measure
from danlu.train.state import restore
from danlu.train.step import step
from tests.equal.curves import STEPS, write_recipe
from tests.ranks import Ranks

TYPED = [
    "memory.precision=fp32",
    "optimizer.schedule={kind: constant, warmup_steps: 2}",
    "optimizer.average={decay: 0.8}",
    "optimizer.rates=[{role: matrix, width: 16}, {role: norm, rate: 2}]",
    "optimizer.max_grad_value=0.01",
    "batch.ramp={from: 2, steps: 3}",
    "batch.micro_batch_size=2",
    "checkpoint.publish=average",
    "evaluate.eval_steps=3",
    "monitor={noise_steps: 2, console: false, tensorboard: false, curve: false}",
]


def trained(recipe: str, name: str, steps: int, *more: str) -> Path:
    return Path(danlu.train(load(recipe, [*TYPED, f"name={name}", f"max_steps={steps}", *more])).root)


def lines(path: Path) -> list[dict[str, Any]]:
    """Without what the machine says: times and bytes."""
    other = ("time", "tokens_per_second", "step_seconds", "data_seconds", "mfu")
    every = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in other and not k.startswith("memory_")} for line in every]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_recipe(tmp_path_factory.mktemp("average")))


@pytest.fixture(scope="module")
def whole(recipe: str) -> Path:
    return trained(recipe, "whole", 6)


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    found = newest(folder / "checkpoints")
    assert found is not None
    dtypes = {"F32": torch.float32, "F64": torch.float64}
    pieces = {part.name: part for table in found.tables for part in table.pieces}
    return read(found, {k: Want(p.shape, (0,) * len(p.shape), p.shape, dtypes[p.dtype]) for k, p in pieces.items()})


def test_gone_on_with_it_is_the_run_that_was_never_stopped(recipe: str, whole: Path) -> None:
    trained(recipe, "halves", 3)
    halves = trained(recipe, "halves", 6)
    assert lines(halves / "metrics.jsonl") == lines(whole / "metrics.jsonl")
    one, other = state_of(whole), state_of(halves)
    assert one.keys() == other.keys() and any(key.startswith("optimizer/average/") for key in one)
    assert all(torch.equal(one[key], other[key]) for key in one)
    noisy = [line for line in lines(whole / "metrics.jsonl") if "noise_spread" in line]
    assert [line["step"] for line in noisy] == [2, 4, 6]


def test_the_average_is_measured_and_published(recipe: str, whole: Path) -> None:
    measured = {line["step"]: line for line in lines(whole / "metrics.jsonl") if "eval_loss_average" in line}
    assert measured.keys() == {3, 6} and all(m["eval_loss"] != m["eval_loss_average"] for m in measured.values())
    told = [event for event in lines(whole / "events.jsonl") if event["event"] == "evaluated"]
    assert [event["eval_loss_average"] for event in told] == [m["eval_loss_average"] for m in measured.values()]

    state, model = state_of(whole), load_file(whole / "model" / "model.safetensors")
    published = model["model.embed_tokens.weight"]
    assert torch.equal(published, state["optimizer/average/embed.weight"])
    assert not torch.equal(published, state["weights/embed.weight"])

    # The weights of a run set to the average have its loss; measuring it leaves them as they were.
    materials = gather(
        load(str(whole / "recipe.yaml")), world=World(), device=torch.device("cpu"), announce=lambda text: None
    )
    run, found = build(materials), newest(whole / "checkpoints")
    assert materials.held is not None and found is not None
    restore(run, found)
    loss, beside = measure(run, materials.held)
    assert loss == measured[6]["eval_loss"] and beside == {"eval_loss_average": measured[6]["eval_loss_average"]}
    with torch.no_grad():
        for name, weight in run.weights.items():
            assert torch.equal(weight, state[f"weights/{name}"])
            weight.copy_(state[f"optimizer/average/{name}"])
    assert measure(run, materials.held)[0] == beside["eval_loss_average"]
    run.source.close()


def test_a_run_cannot_go_on_with_another_average_or_ramp(recipe: str, whole: Path) -> None:
    for other in ("optimizer.average={decay: 0.9}", "optimizer.average=null", "batch.ramp=null"):
        with pytest.raises(InputError, match=r"optimizer.average|batch.ramp"):
            trained(recipe, "whole", 6, other, "checkpoint.publish=final")


def both(world: World, recipe: str, overrides: list[str]) -> tuple[list[float], bool]:
    """Losses of the weights and of their average after each update, and whether measuring moved any."""
    given = load(recipe, ["optimizer.average={decay: 0.8}", "batch.micro_batch_size=2", *overrides])
    materials = gather(given, world=world, device=torch.device("cpu"), announce=lambda text: None)
    run, losses, still = build(materials), [], True
    assert materials.held is not None
    for _ in range(STEPS):
        step(run, run.source.take(materials.micros))
        before = {name: local(weight).clone() for name, weight in run.weights.items()}
        loss, beside = measure(run, materials.held)
        losses += [loss, beside["eval_loss_average"]]
        still = still and all(torch.equal(local(weight), before[name]) for name, weight in run.weights.items())
    run.source.close()
    return losses, still


def local(weight: torch.Tensor) -> torch.Tensor:
    return (weight.to_local() if isinstance(weight, DTensor) else weight).detach()


@pytest.mark.long
def test_measured_between_updates_under_any_layout(recipe: str, ranks: Ranks) -> None:
    """What is gathered for measuring is gone before the weights are theirs again, or later losses would tell."""
    losses, still = both(World(), recipe, [])
    assert still and losses[1] == losses[0] and all(a != b for a, b in zip(losses[2::2], losses[3::2]))
    away = "memory.offload=[weights, gradients, optimizer]"
    assert both(World(), recipe, [away])[0] == pytest.approx(losses, rel=1e-12)
    for plan in (["parallel.zero=3"], ["parallel.zero=1"], ["parallel.replicate=2"], [away]):
        for found, unmoved in ranks.run(both, recipe, plan, size=2):
            assert unmoved and found == pytest.approx(losses, rel=1e-12), plan
