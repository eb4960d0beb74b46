"""Stochastic rounding: unbiased, the same under any layout, and enough to learn by."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from danlu.core.world import World
from danlu.memory.rounding import Place, Stochastic, round_into
from tests.ranks import Ranks


def rounded(exact: Tensor, key: int = 1) -> Tensor:
    low = torch.empty(exact.shape, dtype=torch.bfloat16)
    round_into(low, exact, key=key, shape=exact.shape, offset=(0,) * exact.dim())
    return low


@pytest.mark.parametrize("value", [1.001, -1.001, 3.3e-5, 7.0e8, 1.0 + 2**-7 - 2**-20, 1.2e-40, -2.0e-39])
def test_it_is_unbiased(value: float) -> None:
    """The mean of n draws between neighbours `step` apart lies within five of its standard deviations."""
    count = 400_000
    exact = torch.full((count,), value)
    low = rounded(exact).double()
    below, above = low.min().item(), low.max().item()
    x = float(exact[0])
    assert below < x < above and len(low.unique()) == 2
    step, share = above - below, (x - below) / (above - below)
    assert abs(low.mean().item() - x) < 5 * step * math.sqrt(share * (1 - share) / count) + step * 2**-30
    assert torch.nextafter(torch.tensor(below).bfloat16(), torch.tensor(math.inf).bfloat16()) == above  # neighbours


def test_neighbouring_places_updates_and_names_are_unrelated() -> None:
    exact = torch.full((200_000,), 1.0 + 2**-8)  # half-way: a coin
    coins = (rounded(exact) > 1).double()
    others = [(rounded(exact, key=key) > 1).double() for key in (2, 1 + (1 << 32), 1 << 62)]
    for other in (*others, coins.roll(1), coins.roll(2), coins.roll(512)):
        both = (coins * other).mean().item()
        assert abs(both - 0.25) < 5 * math.sqrt(0.25 * 0.75 / len(coins))


def test_what_bf16_has_stays_as_it_is() -> None:
    exact = torch.tensor([0.0, -0.0, 1.0, -2.5, math.inf, -math.inf, 3.3895313892515355e38, 2**-133])
    assert torch.equal(rounded(exact).float(), exact)
    assert rounded(torch.tensor([math.nan])).isnan().all()


@pytest.mark.parametrize("shape", [(7, 5, 3), (64, 9), (1001,), ()])
def test_each_part_is_rounded_as_the_whole_is(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(3)
    exact = torch.randn(shape, generator=draw)
    whole = rounded(exact, key=9)
    monkeypatch.setattr("danlu.memory.rounding.CHUNK", 16)
    assert torch.equal(rounded(exact, key=9), whole)
    for dim in range(len(shape)):
        start = 0
        for part in exact.chunk(3, dim):
            low = torch.empty(part.shape, dtype=torch.bfloat16)
            offset = tuple(start if d == dim else 0 for d in range(len(shape)))
            round_into(low, part, key=9, shape=shape, offset=offset)
            assert torch.equal(low, whole.narrow(dim, start, part.shape[dim]))
            start += part.shape[dim]


def trained(updates: int, *, decay: float, gradient: float, rate: float = 1e-3) -> nn.Parameter:
    weight = nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([weight], lr=rate, betas=(0.9, 0.999), weight_decay=decay, fused=True)
    carry = Stochastic(1, {weight: Place("w", (1000,), (0,))})
    for update in range(updates):
        weight.grad = torch.full_like(weight, gradient)
        carry(optimizer, update + 1)
    state = optimizer.state[weight]
    assert weight.dtype == state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
    assert state["step"].item() == updates and optimizer.param_groups[0]["params"] == [weight]
    return weight


def test_small_updates_are_not_lost() -> None:
    """A hundred of 1e-3, each less than half a bf16 step at 1.0: to the nearest, nothing would ever move."""
    assert trained(100, decay=0.0, gradient=1.0).float().mean().item() == pytest.approx(0.9, abs=2e-3)
    assert (torch.ones(1).bfloat16() - 1e-3).item() == 1


def test_a_small_decay_is_not_lost() -> None:
    mean = trained(300, decay=0.1, gradient=0.0).float().mean().item()
    assert mean == pytest.approx((1 - 1e-4) ** 300, rel=2e-3)


def test_it_is_the_optimisers_own_update_rounded() -> None:
    """Weights and moments lie at most one step of bf16 from those of the same update in fp32."""
    draw = torch.Generator().manual_seed(2)
    start = torch.randn(50, 8, generator=draw).bfloat16()
    gradient = torch.randn(50, 8, generator=draw).bfloat16()
    weights = [nn.Parameter(start.clone()), nn.Parameter(start.float())]
    optimizers = [torch.optim.AdamW([w], lr=1e-2, weight_decay=0.1, fused=True) for w in weights]
    for weight in weights:
        weight.grad = gradient.to(weight.dtype)
    Stochastic(1, {weights[0]: Place("w", (50, 8), (0, 0))})(optimizers[0], 1)
    optimizers[1].step()
    pairs = [(weights[0], weights[1])]
    pairs += [
        (optimizers[0].state[weights[0]][k], optimizers[1].state[weights[1]][k]) for k in ("exp_avg", "exp_avg_sq")
    ]
    for low, exact in pairs:
        exact = exact.detach()
        step = exact.abs() * 2**-7
        assert ((low.detach().float() - exact).abs() <= step).all()
        assert (low.detach().float() != exact.bfloat16().float()).any()  # not simply the nearest


def test_the_groups_of_the_optimiser_stay_what_they_are_even_where_it_fails() -> None:
    weights = [nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(3)]
    optimizer = torch.optim.AdamW(
        [{"params": weights[:2], "lr": 0.5}, {"params": weights[2:], "lr": 0.0, "weight_decay": 0.0}], fused=True
    )
    carry = Stochastic(1, {w: Place(str(n), (2,), (0,)) for n, w in enumerate(weights)})
    weights[0].grad = torch.ones(2, dtype=torch.bfloat16)
    carry(optimizer, 1)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1]
    assert weights[0][0] != 1 and weights[1][0] == 1  # without a gradient nothing moves
    assert list(optimizer.state) == [weights[0]]
    weights[2].grad = torch.ones(2, dtype=torch.bfloat16)
    del carry.places[weights[2]]
    with pytest.raises(KeyError):
        carry(optimizer, 2)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1]


def moved(world: World, cut: int | None) -> dict[str, Tensor]:
    """The weight and its moments after five updates, whole; cut over ranks along that dim."""
    draw = torch.Generator().manual_seed(6)
    whole = torch.randn(10, 7, generator=draw).bfloat16()
    offset: tuple[int, ...] = (0, 0)

    def lay(tensor: Tensor) -> Tensor:
        if cut is None:
            return tensor
        return distribute_tensor(tensor, init_device_mesh("cpu", (world.size,)), [Shard(cut)])

    weight = nn.Parameter(lay(whole))
    optimizer = torch.optim.AdamW([weight], lr=1e-2, fused=True)
    if isinstance(weight, DTensor):
        _, offset = compute_local_shape_and_global_offset(whole.shape, weight.device_mesh, weight.placements)
    carry = Stochastic(3, {weight: Place("w", (10, 7), offset)})
    for update in range(1, 6):
        weight.grad = lay(torch.randn(10, 7, generator=draw).bfloat16())
        carry(optimizer, update)
    found = {"weight": weight.detach(), **optimizer.state[weight]}
    return {kind: t.full_tensor() if isinstance(t, DTensor) else t for kind, t in found.items()}


def test_updates_of_cut_weights_are_those_of_whole_ones_to_the_bit(ranks: Ranks) -> None:
    [one] = ranks.run(moved, None, size=1)
    for cut in (0, 1):
        for other in ranks.run(moved, cut, size=2):
            assert one.keys() == other.keys() == {"weight", "step", "exp_avg", "exp_avg_sq"}
            assert all(torch.equal(one[kind], other[kind]) for kind in one)
