"""Products in fp8: right to the last bit of what was quantised, and as near as fp8 can be to what was meant."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from danlu.models.attention import together
from danlu.models.linear import BACKWARD, FORWARD, Float8Linear, fits, linear, quantise


def made(rows: tuple[int, ...] = (3, 16), inner: int = 48, outer: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(4)
    hidden = torch.randn(*rows, inner, generator=draw).requires_grad_()
    weight = (torch.randn(outer, inner, generator=draw) * 0.05).requires_grad_()
    return hidden, weight, torch.randn(*rows, outer, generator=draw)


def meant(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """What a tensor is after being quantised with one scale, in float64, written out."""
    scale = exact.detach().abs().max().float() / torch.finfo(dtype).max
    return (exact.detach().float() / scale).to(dtype).double() * scale.double()


@pytest.mark.parametrize("rows", [(3, 16), (1, 16), (5, 7), (1,)])  # 35 and 1 are no multiples of 16
def test_all_three_products_are_those_of_the_quantised_operands(rows: tuple[int, ...]) -> None:
    hidden, weight, gradient = made(rows)
    result = linear(hidden, weight)
    result.backward(gradient)
    x, w, g = meant(hidden, FORWARD), meant(weight, FORWARD), meant(gradient, BACKWARD)
    x, g = x.flatten(0, -2), g.flatten(0, -2)
    for mine, theirs in ((result, x @ w.t()), (hidden.grad, g @ w), (weight.grad, g.t() @ x)):
        theirs = theirs.view(mine.shape)
        assert (mine.double() - theirs).norm() <= 1e-6 * theirs.norm()


def test_it_is_near_what_was_meant() -> None:
    """e4m3 has three bits behind the point, so a number is off by at most 1/16; errors in a sum mostly cancel."""
    hidden, weight, gradient = made((64, 4), inner=256, outer=64)
    result = linear(hidden, weight)
    result.backward(gradient)
    x, w, g = (t.detach().double().flatten(0, -2) for t in (hidden, weight[None], gradient))
    for mine, theirs, bound in ((result, x @ w.t(), 0.05), (hidden.grad, g @ w, 0.09), (weight.grad, g.t() @ x, 0.09)):
        theirs = theirs.view(mine.shape)
        error = (mine.double() - theirs).norm() / theirs.norm()
        assert 1e-3 < error < bound


@pytest.mark.parametrize("dtype", [FORWARD, BACKWARD])
def test_scales(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    low, scale = quantise(torch.tensor([0.5, -3.0, 0.0]), dtype)
    assert low.dtype == dtype and low[1].float() == -largest and scale.item() == pytest.approx(3 / largest)
    for exact in (torch.zeros(3), torch.full((3,), 1e-44)):
        low, scale = quantise(exact, dtype)
        assert (low.float() * scale).isfinite().all() and (low.float() * scale).abs().max() < 1e-43
    for bad in (torch.inf, torch.nan):
        low, scale = quantise(torch.tensor([1.0, bad]), dtype)
        assert not (low.float() * scale).isfinite().any()


def test_what_is_not_finite_reaches_the_result_and_the_gradients() -> None:
    hidden, weight, gradient = made()
    with torch.no_grad():
        hidden[1, 2, 3] = torch.inf
    assert not linear(hidden, weight).isfinite().any()
    hidden, weight, gradient = made()
    gradient[0, 0, 0] = torch.nan
    linear(hidden, weight).backward(gradient)
    assert not hidden.grad.isfinite().any() and not weight.grad.isfinite().any()


def test_results_are_in_the_dtype_that_is_worked_in() -> None:
    hidden, weight, _ = made()
    assert linear(hidden, weight).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        made_low = linear(hidden, weight, torch.ones(32))
    assert made_low.dtype == torch.bfloat16
    made_low.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32
    assert hidden.grad.shape == hidden.shape


def test_a_part_is_swapped_with_its_very_weights() -> None:
    part = nn.Linear(32, 48)
    swapped = Float8Linear.of(part)
    assert swapped.weight is part.weight and swapped.bias is part.bias
    assert dict(swapped.named_parameters()).keys() == dict(part.named_parameters()).keys()
    given = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    assert torch.equal(swapped(given), linear(given, part.weight) + part.bias)
    assert 0 < (swapped(given) - part(given)).norm() / part(given).norm() < 0.08
    assert fits(part) and not fits(nn.Linear(32, 40)) and not fits(nn.Linear(8, 32))
    assert Float8Linear.of(nn.Linear(32, 48, bias=False)).bias is None


def test_parts_of_the_same_states_are_one_product() -> None:
    parts = [Float8Linear.of(nn.Linear(32, n)) for n in (16, 32)]
    given = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    whole = linear(given, torch.cat([p.weight for p in parts]), torch.cat([p.bias for p in parts]))
    assert torch.equal(torch.cat(together(given, *parts), -1), whole)
    mixed = together(given, parts[0], nn.Linear(32, 8))
    assert torch.equal(mixed[0], parts[0](given))
