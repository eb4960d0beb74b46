"""Products of fp32 on a CPU by oneDNN: those of float64, to fp32's rounding, with their gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.models import product as products
from danlu.models.product import Linear, product

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")
ROWS, INNER, OUT = 2 * products.ROWS, 48, 80


@pytest.fixture(autouse=True)
def by_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "ONEDNN", True)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


def results(dtype: torch.dtype, *, bias: bool, turned: bool = False) -> list[Tensor]:
    """The product and its gradients, each as float64."""
    hidden = drawn(INNER, 2, ROWS // 2).permute(1, 2, 0) if turned else drawn(2, ROWS // 2, INNER)
    parts = [hidden, drawn(OUT, INNER), *([drawn(OUT)] if bias else [])]
    leaves = [part.to(dtype).requires_grad_() for part in parts]
    made = product(*leaves) if dtype == torch.float32 else F.linear(*leaves)
    return [x.double() for x in (made, *torch.autograd.grad(made, leaves, drawn(*made.shape).to(dtype)))]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_value_and_gradients(bias: bool, turned: bool) -> None:
    calls = []
    kept, products.multiply = products.multiply, lambda *given: calls.append(1) or kept(*given)
    try:
        made = results(torch.float32, bias=bias, turned=turned)
    finally:
        products.multiply = kept
    assert len(calls) == 2  # the forward's, and the gradient of the states
    for ours, exact in zip(made, results(torch.float64, bias=bias, turned=turned), strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-4)


def test_operator_is_sound() -> None:
    """torch's own checks: of its schema, its shapes without data, and its gradient under the compiler."""
    given = [drawn(ROWS, INNER).requires_grad_(), drawn(OUT, INNER).requires_grad_(), drawn(OUT).requires_grad_()]
    torch.library.opcheck(products.OPERATOR, given)


@pytest.mark.parametrize(
    ("hidden", "weight"),
    [
        (drawn(ROWS, INNER).double(), drawn(OUT, INNER).double()),
        (drawn(ROWS, INNER).bfloat16(), drawn(OUT, INNER).bfloat16()),
        (drawn(products.ROWS - 1, INNER), drawn(OUT, INNER)),
    ],
)
def test_all_else_is_torchs(hidden: Tensor, weight: Tensor) -> None:
    assert not products.faster(hidden, weight)
    assert torch.equal(product(hidden, weight), F.linear(hidden, weight))


def test_autocast_still_lowers() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert Linear(INNER, OUT)(drawn(ROWS, INNER)).dtype == torch.bfloat16
