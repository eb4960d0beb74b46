"""The compute layer on two ranks: sums, one norm whatever the layout, and a part that is not always used."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from danlu.compute.layer import ComputeLayer
from danlu.compute.mesh import Parallel
from danlu.compute.shard import shard
from danlu.core.terms import Terms
from danlu.core.world import World
from danlu.optim.adamw import AdamW
from danlu.optim.layer import OptimLayer
from tests.ranks import Ranks

Layout = tuple[int, int]  # replicate, shard


class Branches(nn.Module):
    """Two branches, of which one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(2)
        self.blocks = nn.ModuleDict({name: nn.Linear(6, 6, bias=False, dtype=torch.float64) for name in "ab"})
        self.last = nn.Linear(6, 3, bias=False, dtype=torch.float64)
        self.heads = nn.ModuleDict()
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=source, dtype=torch.float64)

    def forward(self, given: Tensor, both: bool) -> Tensor:
        return self.last(self.blocks["a"](given) + (self.blocks["b"](given) if both else 0))


def layer(world: World, layout: Layout) -> tuple[Branches, ComputeLayer]:
    model = Branches()
    if world.size > 1:
        mesh = Parallel(replicate=layout[0], shard=layout[1]).mesh("cpu")
        shard(model, model.blocks.values(), mesh=mesh, weights=torch.float64)
    return model, ComputeLayer(cast(Any, model), world=world, device=torch.device("cpu"))


def branches(world: World, layout: Layout) -> tuple[list[float], list[float]]:
    """Norms of six updates, one branch used in every second of them, and where the weights end."""
    model, compute = layer(world, layout)
    optim = OptimLayer(AdamW(max_grad_norm=0.5, learning_rate=0.1), model.named_parameters(), total=6)
    source = torch.Generator().manual_seed(3)
    norms = []
    for update in range(1, 7):
        rows = torch.randn(4, 6, generator=source, dtype=torch.float64).chunk(world.size)[world.rank]
        model(rows, update % 2 == 0).square().sum().backward()
        norm = compute.norm(model.parameters())
        norms.append(norm.item())
        optim.clip(norm)
        assert compute.norm(model.parameters()).item() == pytest.approx(min(0.5, norms[-1]), rel=1e-5)
        optim.step(update)
        optim.zero()
    ends = [cast(Any, p).full_tensor() if world.size > 1 else p for p in model.parameters()]
    return norms, torch.cat([end.detach().flatten() for end in ends]).tolist()


@pytest.mark.parametrize("layout", [(1, 2), (2, 1)], ids=["shard", "replicate"])
def test_the_norm_and_a_branch_of_every_second_update_are_those_of_one_process(ranks: Ranks, layout: Layout) -> None:
    norms, ends = branches(World(), (1, 1))
    for theirs, there in ranks.run(branches, layout, size=2):
        assert theirs == pytest.approx(norms, rel=1e-12)
        assert there == pytest.approx(ends, rel=1e-10)


def votes(world: World) -> tuple[Any, ...]:
    _, compute = layer(world, (1, 2))
    terms = compute.total(Terms(a=torch.tensor(1.0 + world.rank), b=torch.tensor(10.0)))
    told = [compute.agree(torch.tensor(good)) for good in (True, world.rank == 0, world.rank == 1, False)]
    largest = [compute.largest(value) for value in (world.rank, 1 - world.rank, 0)]
    return {name: value.item() for name, value in terms.items()}, told, largest


def test_sums_and_votes_are_the_same_on_every_rank(ranks: Ranks) -> None:
    for made in ranks.run(votes, size=2):
        assert made == ({"a": 3.0, "b": 20.0}, [True, False, False, False], [1, 1, 0])
