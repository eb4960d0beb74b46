"""Norms layer by layer, on one process and on ranks that hold parts or copies."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from danlu.compute.norms import layer_norms, layer_of
from danlu.core.world import World

NAMES = {"embed.weight": (7, 3), "blocks.0.a.weight": (5, 4), "blocks.0.b.weight": (3,), "blocks.10.a.weight": (4, 4)}


def drawn() -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=source, dtype=torch.float64) for name, shape in NAMES.items()}


def expected() -> dict[str, float]:
    tensors = drawn()
    both = torch.cat([tensors["blocks.0.a.weight"].flatten(), tensors["blocks.0.b.weight"]])
    return {
        "embed": tensors["embed.weight"].norm().item(),
        "blocks.0": both.norm().item(),
        "blocks.10": tensors["blocks.10.a.weight"].norm().item(),
    }


def test_a_layer_is_a_block_a_head_or_what_stands_alone() -> None:
    names = ["blocks.3.mlp.up.weight", "embed.weight", "heads.language.weight", "norm.weight", "places.weight"]
    assert [layer_of(name) for name in names] == ["blocks.3", "embed", "heads.language", "norm", "places"]


def test_on_one_process() -> None:
    assert layer_norms(drawn()) == pytest.approx(expected(), rel=1e-14)


def test_where_nothing_came_the_norm_is_nothing() -> None:
    tensors: dict[str, torch.Tensor | None] = {**drawn(), "embed.weight": None, "norm.weight": None}
    assert layer_norms(tensors) == pytest.approx({**expected(), "embed": 0.0, "norm": 0.0}, rel=1e-14)


def test_low_precision_is_added_up_in_fp32() -> None:
    weight = nn.Parameter(torch.full((4096, 64), 0.01, dtype=torch.bfloat16))
    found = layer_norms({"embed.weight": weight})["embed"]
    assert found == pytest.approx(float(torch.tensor(0.01, dtype=torch.bfloat16)) * 512, rel=1e-3)


def on_ranks(world: World, replicate: bool) -> dict[str, float]:
    shape, names = ((2, 1), ("r", "s")) if replicate else ((2,), ("s",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    placements = [Replicate(), Shard(0)] if replicate else [Shard(0)]
    tensors = {name: distribute_tensor(tensor, mesh, placements) for name, tensor in drawn().items()}
    tensors["blocks.0.b.weight"] = drawn()["blocks.0.b.weight"]  # held whole by each
    return layer_norms(tensors)


@pytest.mark.parametrize("replicate", [False, True])
def test_on_two_ranks(ranks, replicate: bool) -> None:
    first, second = ranks.run(on_ranks, replicate)
    assert first == second == pytest.approx(expected(), rel=1e-14)
