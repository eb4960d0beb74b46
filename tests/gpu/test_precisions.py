"""Precisions on a GPU: its own fp8 and fp16 kernels against float64, the CPU's bits where bits are promised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from danlu.core import device as devices
from danlu.core.world import World
from danlu.memory.rounding import round_into
from danlu.models.heads import LanguageHead
from danlu.models.linear import BACKWARD, FORWARD, linear
from danlu.recipe.yaml import load
from danlu.train.assemble import build, gather
from danlu.train.step import step
from tests.equal.curves import write_recipe
from tests.unit.models.test_linear import made, meant

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
CUDA = torch.device("cuda", 0)


@pytest.fixture
def can() -> devices.Abilities:
    return devices.abilities(CUDA)


@pytest.mark.parametrize("rows", [(3, 16), (5, 7), (1,)])
def test_fp8_products_are_those_of_the_quantised_operands(can: devices.Abilities, rows: tuple[int, ...]) -> None:
    if not can.fp8:
        pytest.skip("this GPU multiplies no fp8 (8.9 and later do)")
    hidden, weight, gradient = (t.detach().to(CUDA) for t in made(rows))
    hidden, weight = hidden.bfloat16().requires_grad_(), weight.requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        result = linear(hidden, weight)
    result.backward(gradient.bfloat16())
    x, w, g = meant(hidden, FORWARD), meant(weight, FORWARD), meant(gradient.bfloat16(), BACKWARD)
    x, g = x.flatten(0, -2), g.flatten(0, -2)
    for mine, theirs, bound in ((result, x @ w.t(), 1e-2), (hidden.grad, g @ w, 1e-2), (weight.grad, g.t() @ x, 1e-3)):
        theirs = theirs.view(mine.shape)
        assert (mine.double() - theirs).norm() <= bound * theirs.norm()  # bf16 results; fast sums keep fewer bits


def test_the_head_in_fp16_neither_overflows_nor_underflows() -> None:
    draw = torch.Generator().manual_seed(3)
    head = LanguageHead(64, 5000).to(CUDA)
    with torch.no_grad():
        head.weight.copy_(torch.randn(5000, 64, generator=draw) * 0.05)
    hidden = (torch.rand(1500, 64, generator=draw) * 30).to(CUDA).requires_grad_()
    labels = torch.zeros(1500, dtype=torch.int64, device=CUDA)
    with torch.autocast("cuda", torch.float16):
        head.nll(hidden, labels).backward(torch.tensor(8.0, device=CUDA))
    exact, wide = LanguageHead(64, 5000).to(CUDA).double(), hidden.detach().double().requires_grad_()
    with torch.no_grad():
        exact.weight.copy_(head.weight)
    exact.nll(wide, labels).backward()
    for mine, theirs in ((hidden.grad, wide.grad), (head.weight.grad, exact.weight.grad)):
        assert mine.isfinite().all() and (mine.double() / 8 - theirs).norm() < 0.02 * theirs.norm()


def test_stochastic_rounding_has_the_cpus_bits() -> None:
    exact = torch.randn(300, 70, generator=torch.Generator().manual_seed(1))
    lows = []
    for device in (torch.device("cpu"), CUDA):
        low = torch.empty(exact.shape, dtype=torch.bfloat16, device=device)
        round_into(low, exact.to(device), key=2**60 + 5, shape=exact.shape, offset=(0, 0))
        lows.append(low.cpu())
    assert torch.equal(*lows)


def curve(recipe: str, device: torch.device, *overrides: str) -> list[float]:
    """The losses of a few updates."""
    given = load(recipe, [f"memory.precision={overrides[0]}", *overrides[1:]])
    materials = gather(given, world=World(), device=device, announce=lambda text: None)
    run = build(materials)
    losses = [step(run, run.source.take(materials.micros)).loss for _ in range(5)]
    run.source.close()
    return losses


@pytest.mark.parametrize(
    ("name", "bound"),
    [("fp64", 1e-10), ("fp32", 1e-5), ("bf16", 2e-3), ("fp16", 3e-4), ("fp8", 2e-2), ("bf16_pure", 2e-2)],
)
def test_each_precision_follows_the_cpus_exact_curve(
    tmp_path: Path, can: devices.Abilities, name: str, bound: float
) -> None:
    if (name == "fp8" and not can.fp8) or ("bf16" in name and not can.bf16):
        pytest.skip(f"this GPU does not multiply {name} natively")
    recipe = str(write_recipe(tmp_path))
    exact = curve(recipe, torch.device("cpu"), "fp64")
    for mine, theirs in zip(curve(recipe, CUDA, name), exact, strict=True):
        assert abs(mine - theirs) < bound * theirs


@pytest.mark.parametrize("roles", [{"head": "fp32"}, {"attention": "fp32"}, {"mlp": "fp32", "residual": "bf16"}])
def test_roles(tmp_path: Path, can: devices.Abilities, roles: dict[str, Any]) -> None:
    if not can.bf16:
        pytest.skip("this GPU does not multiply bf16 natively (8.0 and later do)")
    recipe = str(write_recipe(tmp_path))
    asked = [f"memory.roles.{role}={word}" for role, word in roles.items()]
    exact = curve(recipe, torch.device("cpu"), "fp64")
    for mine, theirs in zip(curve(recipe, CUDA, "bf16", *asked), exact, strict=True):
        assert abs(mine - theirs) < 3e-3 * theirs


def test_a_deterministic_run_gives_the_same_bits_twice(tmp_path: Path) -> None:
    """And nothing in it is refused: each kernel of the step has an order. Last, for it holds from then on."""
    recipe = str(write_recipe(tmp_path))
    one, other = (curve(recipe, CUDA, "auto", "deterministic=true") for _ in range(2))
    assert one == other and torch.are_deterministic_algorithms_enabled()
