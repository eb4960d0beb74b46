"""Parts of what is kept, portions of weights, sums over the rows of other ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from danlu.core.world import World, local
from danlu.optim.adafactor import Adafactor
from danlu.optim.adamw8bit import AdamW8bit
from danlu.optim.common import Common, Kept
from danlu.optim.layer import OptimLayer
from danlu.optim.own import Moving, laid, part, portions, spread, total
from tests.ranks import Ranks


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        (Kept(shape=(10, 4), dtype=torch.float32), ((3, 4), (6, 0))),  # a moment: as the weight
        (Kept(shape=(10, 1), dtype=torch.float32), ((3, 1), (6, 0))),  # something of each row
        (Kept(shape=(1, 4), dtype=torch.float32, whole=True), ((1, 4), (0, 0))),
        (Kept(shape=(10, 4), dtype=torch.float32, whole=True), ((10, 4), (0, 0))),
        (Kept(shape=(), dtype=torch.float32), ((), ())),
    ],
)
def test_a_kept_tensor_is_cut_where_its_weight_is(kept: Kept, expected: tuple[object, object]) -> None:
    assert part(kept, (10, 4), (3, 4), (6, 0)) == expected


def test_portions_keep_the_order_and_go_by_whole_weights() -> None:
    sizes = [300_000, 300_000, 10, 900_000, 5, 5]
    moving = [Moving(torch.empty(1), torch.empty(1), {}, torch.empty(size)) for size in sizes]
    cut = [[one.whole.numel() for one in some] for some in portions(moving)]
    assert cut == [[300_000], [300_000, 10], [900_000], [5, 5]]  # 2 MiB are 524,288 numbers of fp32


def test_nothing_is_moved_that_has_no_gradient() -> None:
    one, other = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(3, 4))
    layer = OptimLayer(Adafactor(), [("one", one), ("other", other)], total=2)
    one.grad = torch.ones(3, 4)
    layer.step(1)
    assert not one.eq(1).all() and other.eq(1).all()
    assert {key.split("/")[1] for key in layer.state()} == {"one"}


def kept_on_two(world: World) -> dict[str, tuple[float, list[tuple[int, ...]]]]:
    """Sums over whole weights, and what a rank holds of the state, of five rows on two ranks of a square and a line."""
    found = {}
    whole = torch.arange(15.0).view(5, 3) + 1
    for name, shape, how in (
        ("line", (2,), (Shard(0),)),
        ("square", (1, 2), (Replicate(), Shard(0))),
        ("copies", (2, 1), (Replicate(), Shard(0))),
    ):
        names = tuple(f"{name}{axis}" for axis in range(len(shape)))
        weight = distribute_tensor(whole, init_device_mesh("cpu", shape, mesh_dim_names=names), how)
        [sums] = total([local(weight).sum(0)], [weight])
        assert torch.equal(sums, whole.sum(0)), sums
        [first, second] = total([local(weight).sum().reshape(1), torch.tensor([7.0])], [weight, torch.empty(2)])
        assert second.item() == 7.0
        kept = Adafactor().states(weight.shape, dtype=weight.dtype, role="matrix")
        row = laid(torch.zeros(part(kept["row_var"], (5, 3), local(weight).shape, (0, 0))[0]), kept["row_var"], weight)
        assert isinstance(row, DTensor) and tuple(row.shape) == (5, 1) and row.placements == weight.placements
        column = laid(torch.zeros(1, 3), kept["col_var"], weight)
        assert not isinstance(column, DTensor)
        found[name] = (first.item(), [tuple(local(weight).shape), tuple(local(row).shape)])
    return found


def test_sums_and_kept_tensors_over_ranks(ranks: Ranks) -> None:
    first, second = ranks.run(kept_on_two, size=2)
    assert first["line"] == first["square"] == (120.0, [(3, 3), (3, 1)])
    assert second["line"] == second["square"] == (120.0, [(2, 3), (2, 1)])
    assert first["copies"] == second["copies"] == (120.0, [(5, 3), (5, 1)])


@pytest.mark.parametrize("settings", [Adafactor(), AdamW8bit()], ids=["adafactor", "adamw8bit"])
def test_what_is_said_to_be_kept_is_kept(settings: Common) -> None:
    shapes = {"matrix": (70, 300), "vector": (40,), "small": (5, 5)}
    weights = {name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    layer = OptimLayer(settings, weights.items(), total=2)
    for weight in weights.values():
        weight.grad = torch.ones_like(weight)
    layer.step(1)
    state = layer.state()
    for name in weights:
        have = {key.split("/")[0]: value for key, value in state.items() if key.endswith(f"/{name}")}
        said = layer.kept(name)
        assert {kind: (tuple(v.shape), v.dtype) for kind, v in have.items()} == {
            kind: (kept.shape, kept.dtype) for kind, kept in said.items()
        }
    assert layer.bytes == sum(value.nbytes for value in state.values())


def test_bytes_of_what_is_kept() -> None:
    """Closed: rows and columns; codes of a byte twice, a scale of 4 for each 150 numbers of a row of 300."""
    assert Adafactor().state_bytes((70, 300)) == 4 * (70 + 300 + 1)
    assert AdamW8bit().state_bytes((70, 300)) == 2 * (70 * 300 + 4 * 70 * 2) + 4
    assert AdamW8bit().state_bytes((70, 300), role="embedding") == 2 * 4 * 70 * 300 + 4
    assert AdamW8bit(full_embedding=False).state_bytes((70, 300), role="embedding") < 70 * 300 * 2.1
    assert AdamW8bit().state_bytes((4096, 4096)) / 4096**2 == pytest.approx(2 + 2 * 4 / 256, rel=1e-6)


def where_a_part_is(world: World) -> tuple[bool, str, str]:
    """On a mesh of another device than the part's: whether its memory is the same, and where it and torch's own are."""
    mesh = DeviceMesh("meta", torch.arange(world.size), _init_backend=False)
    hollow = DTensor.from_local(torch.zeros(3, 2, device="meta"), mesh, [Shard(0)], run_check=False)
    part = torch.ones(3, 2)
    made = spread(part, hollow, shape=hollow.shape, stride=hollow.stride())
    assert made.shape == (3 * world.size, 2) and made.placements == (Shard(0),) and made.dtype == part.dtype
    moved = DTensor.from_local(part, mesh, [Shard(0)], run_check=False).to_local()
    return made.to_local().data_ptr() == part.data_ptr(), made.to_local().device.type, moved.device.type


def test_a_part_stays_on_its_device_whatever_the_mesh_is_of(ranks: Ranks) -> None:
    """So that states of weights that are kept on the host stay with them."""
    assert ranks.run(where_a_part_is, size=2) == [(True, "cpu", "meta")] * 2
