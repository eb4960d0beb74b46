"""What ZeRO's stages hold, by closed formulas, and on gloo ranks; what gradients are reduced in."""

from __future__ import annotations

import gc
import time
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from danlu.compute.mesh import Parallel
from danlu.compute.shard import shard
from danlu.compute.zero import Held, held, shapes
from danlu.core.world import World
from tests.ranks import Ranks

WIDE, LAYERS = 96, 3  # a block is 2 x 96 x 96 weights, the rest 5 x 96 and 97 x 96: two first dims that are odd
BLOCK, REST = 2 * WIDE * WIDE, (5 + 97) * WIDE


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDE, WIDE, bias=False)
        self.b = nn.Linear(WIDE, WIDE, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.b(self.a(hidden).tanh())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(97, WIDE)
        self.blocks = nn.ModuleDict({str(n): Block() for n in range(LAYERS)})
        self.last = nn.Linear(WIDE, 5, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.table(tokens)
        for block in self.blocks.values():
            hidden = block(hidden)
        return self.last(hidden)


def test_the_formulas_of_the_three_stages() -> None:
    """Written out by hand for two ranks: 97 rows are cut into 49 and 48, and gathered as 98; 5 as 6."""
    model = Model()
    groups = shapes(model.blocks.values(), model)
    assert sum(n * m for n, m in groups[1]) == REST and len(groups[0]) == LAYERS
    cut = 4 * (LAYERS * BLOCK // 2 + 3 * WIDE + 49 * WIDE)
    rest, whole = 4 * (6 + 98) * WIDE, 4 * (LAYERS * BLOCK + (6 + 98) * WIDE)
    for zero in (1, 2, 3):
        made = held(*groups, shard=2, zero=zero, micros=4, overlapped=False)
        assert (made.weights, made.moments) == (cut, 2 * cut)
        assert made.gathered == (rest + 4 * BLOCK if zero == 3 else whole)
        assert made.gradients == cut + (4 * (LAYERS * BLOCK + REST) if zero == 1 else 4 * BLOCK)
    assert held(*groups, shard=2, zero=1, micros=1) == held(*groups, shard=2, zero=2, micros=7)


def live() -> int:
    """Bytes of every tensor's memory in this process, each counted once."""
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and thing.device.type == "cpu":
            storage = (thing._local_tensor if isinstance(thing, DTensor) else thing).untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def stages(world: World, zero: int) -> dict[str, int]:
    """Bytes over those before the model, at the moments that the formulas speak of; two micro-batches of one token."""
    gc.collect()
    before = live()
    model = Model()
    mesh = Parallel(shard=2).mesh("cpu")
    shards = shard(model, model.blocks.values(), mesh=mesh, weights=torch.float32, zero=cast(Any, zero))
    seen = {}
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    for micro in range(2):
        shards.begin(first=micro == 0, last=micro == 1)
        out = model(tokens).sum()
        seen[f"forward {micro}"] = settled() - before
        out.backward()
        del out
        seen[f"backward {micro}"] = settled() - before
    return seen


def settled() -> int:
    """Live bytes once gloo's threads have let go of what they sent, a moment after whoever waited for it."""
    time.sleep(0.2)
    return live()


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_what_is_held_on_a_rank_is_what_the_formulas_say(ranks: Ranks, zero: int) -> None:
    model = Model()
    groups = shapes(model.blocks.values(), model)
    forecast: Held = held(*groups, shard=2, zero=cast(Any, zero), micros=2)
    whole = 4 * (LAYERS * BLOCK + REST)
    for rank, seen in enumerate(ranks.run(stages, zero, size=2)):
        cut = forecast.weights if rank == 0 else forecast.weights - 4 * 2 * WIDE
        between = {1: forecast.gathered + whole, 2: forecast.gathered + cut, 3: cut}[zero]
        gathered = forecast.gathered - (4 * BLOCK if zero == 3 else 0)  # no block runs between forward and backward
        assert seen["forward 0"] == pytest.approx(cut + gathered, rel=0.03)
        assert seen["backward 0"] == pytest.approx(cut + between, rel=0.03)
        assert seen["backward 1"] == pytest.approx(2 * cut, rel=0.03)


def reduced(world: World, weights: torch.dtype, products: torch.dtype, layout: tuple[int, int]) -> set[torch.dtype]:
    """The dtypes that gradients travelled in."""
    seen: set[torch.dtype] = set()
    originals = {name: getattr(dist, name) for name in ("all_to_all_single", "all_reduce", "reduce_scatter_single")}

    def noting(name: str) -> Any:
        def noted(*tensors: Any, **how: Any) -> Any:
            seen.update(t.dtype for t in (*tensors, *how.values()) if isinstance(t, Tensor) and t.is_floating_point())
            return originals[name](*tensors, **how)

        return noted

    model = Model().to(weights)
    mesh = Parallel(replicate=layout[0], shard=layout[1]).mesh("cpu")
    shards = shard(model, model.blocks.values(), mesh=mesh, weights=weights)
    for name in originals:
        setattr(dist, name, noting(name))
    try:
        with torch.autocast("cpu", dtype=products, enabled=products != weights):
            for micro in range(2):
                shards.begin(first=micro == 0, last=micro == 1)
                model(torch.zeros(2, 3, dtype=torch.int64)).float().sum().backward()
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    bad = [n for n, w in model.named_parameters() if w.grad is None or w.grad.dtype != weights]
    assert not bad, bad
    return seen


@pytest.mark.parametrize("layout", [(1, 2), (2, 1)], ids=["shard", "replicate"])
@pytest.mark.parametrize(
    ("weights", "products", "travels"),
    [
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.float64, torch.float64, torch.float64),
    ],
    ids=["bf16", "pure bf16", "fp64"],
)
def test_gradients_are_reduced_in_at_least_fp32(
    ranks: Ranks, weights: torch.dtype, products: torch.dtype, travels: torch.dtype, layout: tuple[int, int]
) -> None:
    for seen in ranks.run(reduced, weights, products, layout, size=2):
        assert seen == {travels}
