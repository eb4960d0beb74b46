"""Activations on the host: gradients keep their bits, weights stay, each memory travels once."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from danlu.memory import activations
from danlu.memory.activations import Activations, Away

CPU = torch.device("cpu")
LARGE = 512  # bytes


class Net(nn.Module):
    """Views of one product, joined weights, a shared input: what models do with what autograd keeps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.norm = nn.LayerNorm(16)
        self.up, self.gate, self.down = nn.Linear(16, 64), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([self.q.weight, self.k.weight, self.v.weight])
        q, k, v = F.linear(self.norm(x), joined).split(16, -1)
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in (q, k, v))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def gradients(away: Activations | None, *, recompute: bool = False, low: bool = False) -> list[Tensor]:
    """Of two micro-batches through a net that is used twice."""
    net = Net()
    torch.manual_seed(2)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low), away() if away else nullcontext():
        for _ in range(2):
            x = torch.randn(3, 11, 16)
            y = checkpoint(net, x, use_reentrant=False) if recompute else net(x)
            net(y).square().sum().backward()
    found = [weight.grad for weight in net.parameters()]
    return [gradient for gradient in found if gradient is not None]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Away]:
    """Every memory that is sent to the host."""
    made: list[Away] = []

    class Watched(Away):
        def __init__(self, content: Tensor, *, stream: object) -> None:
            super().__init__(content, stream=stream)
            made.append(self)

    monkeypatch.setattr(activations, "Away", Watched)
    return made


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("ahead", [0, 2**20])
def test_gradients_keep_their_bits(sent: list[Away], recompute: bool, low: bool, ahead: int) -> None:
    away = Activations(CPU, [], large=LARGE, ahead=ahead)
    expected = gradients(None, recompute=recompute, low=low)
    made = gradients(away, recompute=recompute, low=low)
    assert len(expected) == 11 and all(torch.equal(one, other) for one, other in zip(expected, made))
    assert away.moved == sum(one.size for one in sent) > 10_000


@pytest.mark.parametrize("low", [False, True])
def test_weights_stay_and_each_memory_travels_once(sent: list[Away], low: bool) -> None:
    net = Net()
    x = torch.randn(3, 11, 16)
    numbers, wide = x.numel(), x.numel() * 4
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low), Activations(CPU, [], large=LARGE)():
        net(x).sum()
    item = 2 if low else 4
    sizes = [one.size for one in sent]
    of_weights = [48 * 16 * item, 64 * 16 * item, 48 * 16 * 4, 64 * 16 * 4]
    assert not set(sizes) & set(of_weights)
    assert sizes.count(numbers * 3 * item) == 1, "queries, keys and values are one memory"
    assert sizes.count(wide * item) == 4, "gate, its activation, up, and their product"


def test_known_weights_stay_even_where_they_are_not_trained(sent: list[Away]) -> None:
    net = Net().requires_grad_(False)
    x = torch.randn(3, 11, 16, requires_grad=True)
    with Activations(CPU, net.parameters(), large=LARGE)():
        F.linear(x, net.up.weight.detach()).sum()
    assert not sent


def test_what_was_sent_is_gone_until_the_backward() -> None:
    net = Net()
    seen: list[StorageWeakRef] = []
    net.up.register_forward_hook(lambda module, inputs, made: seen.append(StorageWeakRef(made.untyped_storage())))
    for away, gone in ((None, False), (Activations(CPU, net.parameters(), large=LARGE), True)):
        with away() if away else nullcontext():
            loss = net(torch.randn(3, 11, 16)).sum()
        assert seen[-1].expired() == gone
        loss.backward()


def test_what_comes_next_is_on_its_way_within_bounds(sent: list[Away]) -> None:
    size = 1000 * 4
    away = Activations(CPU, [], large=LARGE, ahead=2 * size)
    x, factors = torch.randn(1000), [torch.ones(1000, requires_grad=True) for _ in range(6)]
    with away():
        made = [x.add(index) for index in range(6)]
        loss = torch.stack([(one * factor).sum() for one, factor in zip(made, factors)]).sum()
    held: list[int] = []
    for factor in factors:
        factor.register_hook(lambda gradient: held.append(sum(one.back is not None for one in sent)))
    assert len(sent) == 6 and all(one.back is None for one in sent)
    loss.backward()
    assert held and max(held) <= 3 and sum(count >= 2 for count in held) >= 4
    assert all(one.back is None for one in sent)
    assert all(torch.equal(factor.grad, x.add(index)) for index, factor in enumerate(factors))  # type: ignore[arg-type]


def test_a_memory_that_changes_is_sent_as_it_was() -> None:
    x = torch.randn(1000)
    first, second = (torch.ones(1000, requires_grad=True) for _ in range(2))
    with Activations(CPU, [], large=LARGE)():
        held = x.clone()
        loss = (held * first).sum()
        held.add_(1.0)
        loss = loss + (held * second).sum()
    loss.backward()
    assert torch.equal(first.grad, x) and torch.equal(second.grad, x + 1.0)  # type: ignore[arg-type]


def test_a_graph_may_be_gone_through_twice() -> None:
    net = Net()
    with Activations(CPU, [], large=LARGE)():
        loss = net(torch.randn(3, 11, 16)).square().sum()
    loss.backward(retain_graph=True)
    once = {name: weight.grad.clone() for name, weight in net.named_parameters() if weight.grad is not None}
    net.zero_grad()
    loss.backward()
    assert all(torch.equal(gradient, net.get_parameter(name).grad) for name, gradient in once.items())  # type: ignore


def test_memory_that_is_given_again_is_another_memory() -> None:
    """A freed memory's address comes back at once; what was sent from it before must not be taken for it."""
    away = Activations(CPU, [], large=LARGE)
    factors = [torch.ones(1000, requires_grad=True) for _ in range(50)]
    values = [torch.full((1000,), float(index)) for index in range(50)]
    with away():
        terms = []
        for value, factor in zip(values, factors):
            held = value.clone()
            terms.append((held * factor).sum())
            del held
        torch.stack(terms).sum().backward()
    assert all(torch.equal(factor.grad, value) for factor, value in zip(factors, values))  # type: ignore[arg-type]
