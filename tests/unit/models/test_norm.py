"""Norms against torch's own, in value and gradient, and in the dtype that is asked for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from danlu.models.norm import Norm


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_value_and_gradients_equal_torchs(kind: str, dtype: torch.dtype, bound: float) -> None:
    draw = torch.Generator().manual_seed(0)
    norm = Norm(24, kind=kind, eps=1e-5)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(1 + 0.3 * torch.randn(24, generator=draw))
    norm = norm.to(dtype)
    hidden = (0.3 + torch.randn(3, 7, 24, generator=draw)).to(dtype).requires_grad_()
    pull = torch.randn(3, 7, 24, generator=draw).to(dtype)
    if kind == "rms":
        wanted = F.rms_norm(hidden, (24,), norm.weight, 1e-5)
    else:
        wanted = F.layer_norm(hidden, (24,), norm.weight, norm.bias, 1e-5)
    inputs = [hidden, *norm.parameters()]
    got = norm(hidden)
    torch.testing.assert_close(got, wanted, atol=bound, rtol=0)
    gradients = (torch.autograd.grad(out, inputs, pull) for out in (got, wanted))
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b, atol=bound, rtol=bound)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_half_precision_states_are_normalised_in_fp32(kind: str) -> None:
    norm = Norm(64, kind=kind, eps=1e-5)
    torch.nn.init.ones_(norm.weight)
    if norm.bias is not None:
        torch.nn.init.zeros_(norm.bias)
    hidden = (300 * torch.randn(2, 64, generator=torch.Generator().manual_seed(1))).bfloat16()
    exact = norm.double()(hidden.double())
    got = norm.bfloat16()(hidden)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, exact.bfloat16())


def test_autocast_gives_its_dtype_and_leaves_float64_alone() -> None:
    norm = Norm(8, kind="rms", eps=1e-5)
    torch.nn.init.ones_(norm.weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(torch.randn(2, 8)).dtype == torch.bfloat16
        assert norm.double()(torch.randn(2, 8).double()).dtype == torch.float64


def test_a_backward_called_under_autocast_is_exact() -> None:
    draw = torch.Generator().manual_seed(2)
    norm = Norm(64, kind="rms", eps=1e-5)
    with torch.no_grad():
        norm.weight.copy_(1 + 0.3 * torch.randn(64, generator=draw))
    hidden = torch.randn(9, 64, generator=draw, requires_grad=True)
    pull = torch.randn(9, 64, generator=draw).bfloat16()
    inputs = (hidden, norm.weight)
    wanted = torch.autograd.grad(F.rms_norm(hidden, (64,), norm.weight, 1e-5), inputs, pull.float())
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.autograd.grad(norm(hidden), inputs, pull)
    for a, b in zip(got, wanted):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
