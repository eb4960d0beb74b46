"""Whole matrices out of rows on several ranks, and back."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from danlu.core.world import World, local
from danlu.optim.sharing import Exchange
from tests.ranks import Ranks

SHAPES = [(7, 3), (2, 5), (1, 4), (6, 6), (5, 2)]  # on two ranks: 4 + 3 rows, 1 + 1, 1 + 0, ...


def shared(world: World, copies: int, dtype: torch.dtype) -> tuple[int, list[tuple[int, int]], bool]:
    """Work that needs the whole (its rows in reverse, each times its sum) on matrices that are cut or copied."""
    mesh = init_device_mesh("cpu", (copies, world.size // copies), mesh_dim_names=("copies", "rows"))
    source = torch.Generator().manual_seed(5)
    wholes = [torch.randn(shape, generator=source).to(dtype) for shape in SHAPES]
    cut = [distribute_tensor(whole, mesh, (Replicate(), Shard(0)), src_data_rank=None) for whole in wholes]
    exchange = Exchange(cut[0])
    worked: list[tuple[int, int]] = []

    def work(whole: torch.Tensor) -> torch.Tensor:
        worked.append((whole.shape[0], whole.shape[1]))
        return whole.flip(0) * whole.sum()

    right = True
    for start in range(0, len(cut), exchange.ranks):
        turn = cut[start : start + exchange.ranks]
        found = exchange.each([local(one) for one in turn], [one.shape for one in turn], work)
        for one, rows, whole in zip(turn, found, wholes[start:]):
            expected = distribute_tensor(whole.flip(0) * whole.sum(), mesh, one.placements, src_data_rank=None)
            right &= torch.equal(rows, local(expected))
    return exchange.ranks, worked, right


def test_each_matrix_is_worked_on_once_by_one_rank(ranks: Ranks) -> None:
    for copies, dtype in ((1, torch.float64), (2, torch.float64), (1, torch.bfloat16)):
        first, second = ranks.run(shared, copies, dtype, size=2)
        assert first == (2, [SHAPES[0], SHAPES[2], SHAPES[4]], True)
        assert second == (2, [SHAPES[1], SHAPES[3]], True)


def test_four_ranks_in_a_square(ranks: Ranks) -> None:
    found = ranks.run(shared, 2, torch.float32, size=4)
    assert all(right for _, _, right in found)
    assert sorted(shape for _, worked, _ in found for shape in worked) == sorted(SHAPES)


def test_alone_nothing_is_sent() -> None:
    assert Exchange(torch.empty(3, 3)).each([torch.eye(2)], [torch.Size((2, 2))], lambda whole: whole * 2)[0][0, 0] == 2
