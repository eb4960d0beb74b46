"""Products of fp32 on a CPU by oneDNN: those of float64, to fp32's rounding, with their gradients."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.models import heads
from danlu.models import product as products
from danlu.models.heads import LanguageHead
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


def test_compiled_whole() -> None:
    """No graph break, and a gradient without strides, as a sum's is."""
    hidden, part = drawn(ROWS, INNER).requires_grad_(), Linear(INNER, OUT)
    torch.compile(part, backend="aot_eager", fullgraph=True)(hidden).sum().backward()
    torch.testing.assert_close(hidden.grad, part.weight.detach().sum(0).expand(ROWS, -1), rtol=1e-5, atol=1e-5)


def test_a_head_holds_one_chunk_of_logits_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Tensor]] = []

    def watched(*given: Tensor) -> Tensor:
        assert not any(chunk() is not None for chunk in made)
        logits = products.multiply(*given)
        made.append(weakref.ref(logits))
        return logits

    monkeypatch.setattr(heads, "multiply", watched)
    head, hidden = LanguageHead(INNER, OUT, rows=ROWS), drawn(3 * ROWS, INNER).requires_grad_()
    torch.nn.init.normal_(head.weight)
    labels = torch.arange(3 * ROWS).remainder(OUT)
    loss = head.nll(hidden, labels)
    exact = F.cross_entropy(hidden.double() @ head.weight.double().t(), labels, reduction="sum")
    assert len(made) == 3
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(head.logp(hidden, labels).sum(), -loss, rtol=1e-6, atol=0)
