"""The chunked head equals torch's cross entropy over whole logits, in value and gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from danlu.core.batch import IGNORE
from danlu.models import heads
from danlu.models.heads import LanguageHead

DIM, VOCAB = 16, 50


def made(rows: int = 1024, *, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> tuple:
    """A head, hidden [3, 7, D] and labels with some IGNORE: the first four of row 0 (whole chunks of rows 1 and 3)."""
    draw = torch.Generator().manual_seed(5)
    head = LanguageHead(DIM, VOCAB, rows=rows).to(dtype)
    with torch.no_grad():
        head.weight.copy_(torch.randn(VOCAB, DIM, generator=draw, dtype=torch.float64) * scale)
    hidden = torch.randn(3, 7, DIM, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, (3, 7), generator=draw)
    labels[0, :4] = IGNORE
    labels[2, 6] = IGNORE
    return head, hidden, labels


def whole(head: LanguageHead, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = F.linear(hidden, head.weight).view(-1, VOCAB)
    return F.cross_entropy(logits, labels.view(-1), ignore_index=IGNORE, reduction="sum")


def value_and_gradients(head: LanguageHead, hidden: torch.Tensor, loss: torch.Tensor) -> tuple[torch.Tensor, ...]:
    hidden.grad = head.weight.grad = None
    (loss / 17).backward()
    return loss.detach(), hidden.grad, head.weight.grad


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 20, 21, 1024])  # 21 rows: one chunk to 21, many that do not divide
@pytest.mark.parametrize("way", ["nll", "logp"])
def test_chunked_equals_whole(dtype: torch.dtype, tolerance: float, rows: int, way: str) -> None:
    head, hidden, labels = made(rows, dtype=dtype)
    expected = value_and_gradients(head, hidden, whole(head, hidden, labels))
    loss = head.nll(hidden, labels) if way == "nll" else -head.logp(hidden, labels).sum()
    got = value_and_gradients(head, hidden, loss)
    assert got[0].dtype == dtype
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.parametrize("rows", [3, 1024])
def test_logp_of_each_token_and_its_weighted_gradient(rows: int) -> None:
    head, hidden, labels = made(rows, dtype=torch.float64)
    weights = torch.linspace(-2, 3, labels.numel(), dtype=torch.float64).view(labels.shape)
    scores = torch.log_softmax(head.logits(hidden), -1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    scores = torch.where(labels == IGNORE, 0, scores)
    expected = value_and_gradients(head, hidden, (scores * weights).sum())
    mine = head.logp(hidden, labels)
    torch.testing.assert_close(mine, scores, rtol=1e-14, atol=1e-14)
    assert (mine[labels == IGNORE] == 0).all()
    got = value_and_gradients(head, hidden, (mine * weights).sum())
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("way", ["nll", "logp"])
def test_ignored_rows_give_exactly_nothing_whatever_they_hold(way: str) -> None:
    head, hidden, labels = made(2, dtype=torch.float64)
    poisoned = hidden.detach().clone()
    poisoned[labels == IGNORE] = float("nan")
    results = []
    for here in (hidden, poisoned.requires_grad_()):
        loss = head.nll(here, labels) if way == "nll" else -head.logp(here, labels).sum()
        results.append(value_and_gradients(head, here, loss))
        assert (here.grad[labels == IGNORE] == 0).all()
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


def test_no_label_at_all_is_zero() -> None:
    head, hidden, labels = made()
    loss, of_hidden, of_weight = value_and_gradients(head, hidden, head.nll(hidden, torch.full_like(labels, IGNORE)))
    assert loss == 0
    assert not of_hidden.any()
    assert not of_weight.any()


def test_a_logit_that_is_not_finite_shows_in_the_loss() -> None:
    head, hidden, labels = made()
    with torch.no_grad():
        hidden[1, 2, 0] = float("inf")
    assert not head.nll(hidden, labels).isfinite()


def test_extreme_logits_neither_overflow_nor_vanish() -> None:
    """A label whose probability is far below the smallest float: -log p is the difference of logits, exactly."""
    head = LanguageHead(1, 3)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[2000.0], [0.0], [-2000.0]]))
    loss = head.nll(torch.ones(1, 1), torch.tensor([2]))
    assert loss.item() == 4000.0


def test_bf16_loss_is_near_the_float64_one_and_summed_in_fp32() -> None:
    """Rounding 2,000 losses of about 10 as they are summed in bf16 would lose more than a tenth of them."""
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(2000, 64, generator=draw, requires_grad=True)
    labels = torch.randint(0, 1000, (2000,), generator=draw)
    head = LanguageHead(64, 1000)
    with torch.no_grad():
        head.weight.copy_(torch.randn(1000, 64, generator=draw) * 0.3)
    exact = F.cross_entropy(hidden.double() @ head.weight.double().t(), labels, reduction="sum")
    exact.backward()
    expected = hidden.grad.clone(), head.weight.grad.clone()
    hidden.grad = head.weight.grad = None
    with torch.autocast("cpu", torch.bfloat16):
        loss = head.nll(hidden, labels)
    loss.backward()
    assert loss.dtype == torch.float32
    assert abs(loss.item() / exact.item() - 1) < 1e-3
    for mine, theirs in zip((hidden.grad, head.weight.grad), expected, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - theirs).norm() < 0.01 * theirs.norm()


def test_bf16_logp_takes_the_forwards_precision_into_the_backward() -> None:
    head, hidden, labels = made(4)
    gradients = []
    for outside in (False, True):
        hidden.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            loss = head.logp(hidden, labels).sum()
            if not outside:
                loss.backward()
        if outside:
            loss.backward()
        gradients.append(hidden.grad)
    assert torch.equal(*gradients)


def test_float64_stays_float64_under_autocast() -> None:
    head, hidden, labels = made(dtype=torch.float64)
    expected = whole(head, hidden, labels)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(head.nll(hidden, labels), expected, rtol=1e-14, atol=0)


class Largest(TorchDispatchMode):
    """The most elements of any tensor that is made while it is on."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, torch.Tensor):
                self.elements = max(self.elements, one.numel())
        return result


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("way", ["nll", "logp"])
def test_whole_logits_never_exist(precision: str, way: str) -> None:
    count, rows, vocab, dim = 1000, 100, 2000, 8
    head = LanguageHead(dim, vocab, rows=rows)
    torch.nn.init.zeros_(head.weight)
    hidden = torch.zeros(count, dim, requires_grad=True)
    labels = torch.zeros(count, dtype=torch.int64)
    with Largest() as largest, torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        loss = head.nll(hidden, labels) if way == "nll" else head.logp(hidden, labels).sum()
        loss.backward()
    assert largest.elements == rows * vocab
    with Largest() as largest:
        head.logits(hidden)
    assert largest.elements == count * vocab


def test_a_large_vocabulary_bounds_the_chunk_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "LOGITS", 500 * 6 + 1)  # six rows
    head = LanguageHead(2, 500)
    torch.nn.init.zeros_(head.weight)
    with Largest() as largest:
        head.nll(torch.zeros(21, 2), torch.zeros(21, dtype=torch.int64))
    assert largest.elements == 6 * 500  # 21 rows: 4 chunks of at most 6


@pytest.mark.parametrize("part", ["hidden", "weight", "none", "no_grad"])
def test_no_gradient_is_made_that_is_not_needed(part: str) -> None:
    head, hidden, labels = made(7)
    expected = value_and_gradients(head, hidden, whole(head, hidden, labels))
    hidden.grad = head.weight.grad = None
    hidden.requires_grad_(part != "hidden" and part != "none")
    head.weight.requires_grad_(part != "weight" and part != "none")
    products = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_):
                products.append(function)
            return function(*args, **(kwargs or {}))

    with torch.set_grad_enabled(part != "no_grad"), Products():
        loss = head.nll(hidden, labels)
    assert loss.item() == pytest.approx(expected[0].item(), rel=1e-6)
    assert len(products) == (3 if part in ("none", "no_grad") else 6)  # three chunks: scored, and one gradient each
    if part in ("hidden", "weight"):
        (loss / 17).backward()
        grad = head.weight.grad if part == "hidden" else hidden.grad
        torch.testing.assert_close(grad, expected[2 if part == "hidden" else 1])
        assert (hidden.grad if part == "hidden" else head.weight.grad) is None


def test_a_tie_is_the_same_parameter_and_gathers_both_gradients() -> None:
    embedding = torch.nn.Embedding(VOCAB, DIM).double()
    head = LanguageHead(DIM, VOCAB, embedding.weight)
    assert head.weight is embedding.weight
    tokens, labels = torch.arange(20), torch.arange(1, 21)
    head.nll(embedding(tokens), labels).backward()
    got, embedding.weight.grad = embedding.weight.grad, None
    F.cross_entropy(embedding(tokens) @ embedding.weight.t(), labels, reduction="sum").backward()
    torch.testing.assert_close(got, embedding.weight.grad, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match=r"\(50, 16\) is not \(51, 16\)"):
        LanguageHead(DIM, VOCAB + 1, embedding.weight)


def test_the_gradient_of_nll_can_be_asked_for_once() -> None:
    head, hidden, labels = made()
    loss = head.nll(hidden, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once only"):
        loss.backward()


@pytest.mark.parametrize("way", ["nll", "logp"])
def test_second_derivatives_are_refused(way: str) -> None:
    head, hidden, labels = made()
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(getattr(head, way)(hidden, labels).sum(), hidden, create_graph=True)


def in_fp16(head: LanguageHead, hidden: torch.Tensor, labels: torch.Tensor, upstream: float) -> tuple:
    """Gradients of nll under fp16, begun with a scale and divided by it, and the same in float64."""
    hidden.grad = head.weight.grad = None
    with torch.autocast("cpu", torch.float16):
        loss = head.nll(hidden, labels)
    loss.backward(torch.tensor(upstream))
    assert loss.dtype == torch.float32
    low = [g.double() / upstream for g in (hidden.grad, head.weight.grad)]
    exact, wide = LanguageHead(*head.weight.shape[::-1]).double(), hidden.detach().double().requires_grad_()
    with torch.no_grad():
        exact.weight.copy_(head.weight)
    exact.nll(wide, labels).backward()
    return low, [wide.grad, exact.weight.grad]


def test_fp16_gradients_lose_nothing_to_underflow() -> None:
    """Half of the tokens are so unlikely that fp16 has no number for their probability (3e-8 and below): what their
    rows of the weight's gradient are is off by no more than fp16's rounding of the logits, e^(2^-7)."""
    draw = torch.Generator().manual_seed(3)
    head, hidden = LanguageHead(8, 512), torch.full((6, 8), 1.0).requires_grad_()
    with torch.no_grad():
        head.weight.copy_(torch.randn(512, 8, generator=draw) * 0.02)
        head.weight[256:] -= 1.5  # logits of about -12
    labels = torch.arange(6)
    low, exact = in_fp16(head, hidden, labels, 1.0)
    rare = exact[1][256:].abs()
    assert (rare > 0).all() and rare.max() < 6e-7 and (exact[1][256:] / 6).abs().max() < 6e-8
    assert ((low[1][256:] - exact[1][256:]).abs() / rare).max() < 0.02
    for mine, theirs in zip(low, exact, strict=True):
        assert (mine - theirs).norm() / theirs.norm() < 2e-3


def test_fp16_gradients_do_not_overflow_where_the_result_does_not() -> None:
    """A thousand rows with one label and large states: their sum is beyond fp16, and the weight's gradient is fp32."""
    draw = torch.Generator().manual_seed(3)
    head, hidden = LanguageHead(8, 16), (torch.rand(1000, 8, generator=draw) * 10 + 200).requires_grad_()
    with torch.no_grad():
        head.weight.copy_(torch.randn(16, 8, generator=draw) * 0.01)
    low, exact = in_fp16(head, hidden, torch.zeros(1000, dtype=torch.int64), 8.0)
    assert exact[1].abs().max() > 65504
    for mine, theirs in zip(low, exact, strict=True):
        assert mine.isfinite().all() and (mine - theirs).norm() / theirs.norm() < 0.03


def test_fp16_overflows_where_the_result_does() -> None:
    """What the hidden states' fp16 cannot hold is infinite, so that the loss's scale hears of it."""
    draw = torch.Generator().manual_seed(3)
    head, hidden = LanguageHead(8, 16), torch.randn(4, 8, generator=draw).half().requires_grad_()
    with torch.no_grad():
        head.weight.copy_(torch.randn(16, 8, generator=draw))
    with torch.autocast("cpu", torch.float16):
        head.nll(hidden, torch.zeros(4, dtype=torch.int64)).backward(torch.tensor(2.0**20))
    assert hidden.grad.isinf().any() and head.weight.grad.isfinite().all()


def test_products_may_be_said() -> None:
    head, hidden, labels = made()
    wide = head.nll(hidden, labels).item()
    low = []
    for products in (torch.float32, torch.bfloat16):
        head.products = products
        with torch.autocast("cpu", torch.bfloat16):
            low.append((head.nll(hidden, labels).item(), head.logits(hidden).dtype))
    assert low[0] == (wide, torch.float32) and low[1][0] != wide and low[1][1] == torch.bfloat16
    head.double().products = torch.float32
    assert head.nll(hidden.detach().double(), labels).dtype == torch.float64
