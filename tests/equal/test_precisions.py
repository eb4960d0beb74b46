"""What no precision may change: independence of the layout, a resume to the bit, one loss scale on all ranks."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from danlu.core.world import World
from danlu.memory.scale import LossScale, Scale
from danlu.train.step import step
from tests.equal import curves
from tests.equal.curves import Curve, curve, write_recipe
from tests.ranks import Ranks

EXACT = 1e-12
STEPS = 8
MIXED = "memory.roles={attention: fp32, residual: bf16}"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_recipe(tmp_path_factory.mktemp("equal")))


def scaled(world: World, recipe: str, overrides: list[str], start: float) -> Curve:
    """The curve in float64 with a loss scale, as fp16 has one."""
    run, micros = curves._assemble(world, recipe, overrides)
    run.memory.scale = Scale(LossScale(start=start, growth_interval=2))
    run.memory.weights = list(run.weights.values())
    run.compute.upstream = run.memory.upstream
    made = curves._go(run, micros)
    assert run.memory.scale.value == 4 * start
    return made


def test_a_loss_scale_changes_no_bit(recipe: str, ranks: Ranks) -> None:
    plan = ["batch.micro_batch_size=2"]
    for size in (1, 2):
        plain, with_scale = (
            ranks.run(curve, recipe, plan, size=size),
            ranks.run(scaled, recipe, plan, 1024.0, size=size),
        )
        for one, other in zip(plain, with_scale, strict=True):
            assert one.losses == other.losses and one.norms == other.norms
            assert all((one.end[name] == other.end[name]).all() for name in one.end)


@pytest.mark.parametrize("precision", ["fp16", "fp8", "bf16_pure", "bf16"])
@pytest.mark.parametrize("size", [1, 2])
def test_resume_is_equal_to_the_bit(recipe: str, ranks: Ranks, tmp_path: Path, precision: str, size: int) -> None:
    plan = [f"memory.precision={precision}", "batch.micro_batch_size=2", "memory.loss_scale.growth_interval=2"]
    whole = ranks.run(curve, recipe, plan, 0, str(tmp_path), size=size)
    rest = ranks.run(curve, recipe, plan, 2, str(tmp_path), size=size)
    for before, after in zip(whole, rest, strict=True):
        assert before.losses[2:] == after.losses and before.norms[2:] == after.norms
        assert all((before.end[name] == after.end[name]).all() for name in before.end)


@pytest.mark.parametrize(("precision", "bound"), [("bf16", 2e-3), ("fp16", 3e-4), ("fp8", 2e-2), ("bf16_pure", 2e-2)])
def test_each_precision_follows_the_exact_curve(recipe: str, ranks: Ranks, precision: str, bound: float) -> None:
    """On one process, and on two, each with its own rounding."""
    exact = curve(World(), recipe, [])
    for size in (1, 2):
        for made in ranks.run(curve, recipe, [f"memory.precision={precision}", "batch.micro_batch_size=4"], size=size):
            off = np.abs(np.array(made.losses) - np.array(exact.losses)) / np.array(exact.losses)
            assert 0 < off.max() < bound
            assert made.weights == exact.weights


def overflowing(world: World, recipe: str, *, only: int, at: tuple[int, ...], agree: bool = True) -> list[Any]:
    """Of each update in fp16: its scale, whether it was made, the sum of all weights, and the scale after it.

    On rank `only`, in updates `at`, a gradient of hidden states is infinite. Not agreed: each rank goes by what its own
    numbers are.
    """
    plan = ["memory.precision=fp16", "memory.loss_scale.growth_interval=3", "batch.micro_batch_size=4"]
    run, micros = curves._assemble(world, recipe, plan)
    update = 0

    def poison(module: Any, given: Any, hidden: torch.Tensor) -> None:
        if hidden.requires_grad and world.rank == only and update in at:
            hidden.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))

    run.compute.model.blocks["1"].mlp.register_forward_hook(poison)
    if not agree:
        settle = run.memory.settle
        run.memory.settle = lambda sound: settle(not (world.rank == only and update in at))  # type: ignore[method-assign]
    said = []
    while update < STEPS:
        update += 1
        report = step(run, run.source.take(micros))
        whole = sum(_whole(weight).sum().item() for weight in run.weights.values())
        said.append((report.extra["loss_scale"], report.sound, whole, run.memory.state()["loss_scale"]))
    run.source.close()
    return said


def _whole(weight: torch.Tensor) -> torch.Tensor:
    weight = weight.detach().double()
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def test_an_overflow_on_one_rank_is_one_on_all(recipe: str, ranks: Ranks) -> None:
    one, other = ranks.run(_one_overflows, recipe, size=2)
    assert one == other
    scales, sound = [line[0] for line in one], [line[1] for line in one]
    assert sound == [True, False, True, True, True, False, False, True]
    assert scales == [65536, 65536, 32768, 32768, 32768, 65536, 32768, 16384]
    sums = [line[2] for line in one]
    assert [a == b for a, b in pairwise(sums)] == [not made for made in sound[1:]]


def test_a_scale_that_is_not_agreed_is_caught(recipe: str, ranks: Ranks) -> None:
    one, other = ranks.run(_one_goes_alone, recipe, size=2)
    assert [line[3] for line in one] != [line[3] for line in other]


def _one_overflows(world: World, recipe: str) -> list[Any]:
    return overflowing(world, recipe, only=1, at=(2, 6, 7))


def _one_goes_alone(world: World, recipe: str) -> list[Any]:
    return overflowing(world, recipe, only=1, at=(2, 6, 7), agree=False)


def test_fp16_finds_its_scale_by_itself_as_torchs_scaler_does(recipe: str) -> None:
    """From far too large a scale, with overflows that are real: the scales are GradScaler's for the same overflows."""
    plan = ["memory.precision=fp16", "memory.loss_scale={start: 16777216, growth_interval: 2}"]
    run, micros = curves._assemble(World(), recipe, plan)
    reports = [step(run, run.source.take(micros)) for _ in range(12)]
    run.source.close()
    sound = [report.sound for report in reports]
    assert not sound[0] and sound.count(False) >= 2 and sound.count(True) >= 4
    weight = torch.nn.Parameter(torch.ones(1))
    scaler, theirs = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2), []
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for fine in sound:
        theirs.append(scaler.get_scale())
        scaler.scale(weight.sum()).backward()
        weight.grad.mul_(1.0 if fine else torch.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert [report.extra["loss_scale"] for report in reports] == theirs
    losses = [report.loss for report in reports]
    assert losses[-1] < losses[0] and all(report.norm.isfinite() == report.sound for report in reports)


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("plan", [["memory.precision=fp8", "memory.roles.head=fp32"], ["memory.precision=bf16", MIXED]])
def test_recomputing_changes_no_bit(recipe: str, plan: list[str], kind: str) -> None:
    one, other = (curve(World(), recipe, [*plan, f"memory.recompute={how}"]) for how in ("none", kind))
    assert one.losses == other.losses and one.norms == other.norms


def test_precisions_are_not_the_same(recipe: str) -> None:
    """A guard of the tests above: each name changes the numbers."""
    ends = [curve(World(), recipe, [f"memory.precision={name}"]).losses[-1] for name in ("fp32", "bf16", "fp16", "fp8")]
    assert len(set(ends)) == 4


def test_a_policy_left_out_is_caught(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: gradients that keep their scale are clipped as if they were that large."""
    usual = curve(World(), recipe, ["memory.precision=fp16"])
    monkeypatch.setattr(Scale, "unscale", lambda self, weights: None)
    assert usual.distance(curve(World(), recipe, ["memory.precision=fp16"])) > 1
