"""danlu's step on several ranks of this machine, over gloo: the same decoder and global batch as bench/train_danlu.py.

    .venv/bin/python bench/run.py --cells 4096:512:fp32 50257:256:fp32 -- \\
        "bench/ranks.py --ranks 2 --threads 1" "bench/train_danlu.py --threads 2"

compares two ranks on two cores with one process of two threads. `--zero`, `--replicate` and `--micros` (micro-batches
of a rank) choose the layout; rss_mb is the sum over the ranks. `--wait` leaves gathers and reductions as FSDP2 makes
them on a CPU: begun and waited for on the spot.
"""

from __future__ import annotations

import multiprocessing
import resource
import tempfile
from collections.abc import Mapping
from typing import Any

from common import Meter, options, tokens

chosen = options(
    ranks={"type": int, "default": 2},
    zero={"type": int, "default": 3, "choices": [1, 2, 3]},
    replicate={"type": int, "default": 1},
    micros={"type": int, "default": 1},
    wait={"action": "store_true"},
)

import torch
import torch.distributed as dist


def main() -> None:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=work, args=(rank, f"{folder}/store")) for rank in range(1, chosen.ranks)]
        for rank in ranks:
            rank.start()
        work(0, f"{folder}/store")
        for rank in ranks:
            rank.join()


def work(rank: int, store: str) -> None:
    """One rank's run; the first prints the result."""
    from danlu.core.world import World

    torch.set_num_threads(chosen.threads)
    meeting = dist.FileStore(store, chosen.ranks)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=chosen.ranks)
    run = assemble(World(rank=rank, size=chosen.ranks, local_rank=rank))
    from danlu.train.step import step

    meter = Meter(f"danlu x{chosen.ranks}", chosen)
    for _ in range(chosen.warm + chosen.steps):
        meter.tick(step(run, run.source.take(chosen.micros)).loss)
    resident = [None] * chosen.ranks
    dist.all_gather_object(resident, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    if rank == 0:
        meter.report(rss_mb=round(sum(resident)), ranks=chosen.ranks, zero=chosen.zero, replicate=chosen.replicate)
    dist.destroy_process_group()


def assemble(world: Any) -> Any:
    """The benchmark's decoder on this rank."""
    from decoder import family

    from danlu.compute.layer import ComputeLayer
    from danlu.compute.mesh import Parallel
    from danlu.compute.shard import materialise, shard
    from danlu.memory.layer import MemoryLayer
    from danlu.memory.precision import choose
    from danlu.models.stack import plain
    from danlu.models.start import fill
    from danlu.objectives.causal import Causal
    from danlu.optim.adamw import AdamW
    from danlu.optim.layer import OptimLayer
    from danlu.optim.schedule import Constant
    from danlu.train.run import Run

    device = torch.device("cpu")
    with torch.device("meta"):
        model = family(chosen).build()
    if chosen.compile:
        from danlu.compute.compile import Compiled

        Compiled(model.blocks.values(), say=print)
    mesh = Parallel(replicate=chosen.replicate).over(world.size).mesh("cpu")
    shards = shard(model, model.blocks.values(), mesh=mesh, weights=torch.float32, zero=chosen.zero)
    if chosen.wait:
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

        shards.reduction = None
        for group in (*model.blocks.values(), model):
            group.set_custom_all_gather(DefaultAllGather())
            group.set_custom_reduce_scatter(DefaultReduceScatter())
            group.set_modules_to_forward_prefetch([])
    materialise(model, device=device, dtype=torch.float32)
    fill(model, 0)
    named = {plain(name): parameter for name, parameter in model.named_parameters()}
    optimizer = AdamW(learning_rate=3e-4, weight_decay=0.01, betas=(0.9, 0.999), schedule=Constant())
    return Run(
        compute=ComputeLayer(model, world=world, device=device, shards=shards),
        memory=MemoryLayer(device=device, precision=choose(chosen.dtype, device)),
        optim=OptimLayer(optimizer, named.items(), total=chosen.warm + chosen.steps),
        objective=Causal(),
        source=Rows(tokens(chosen, chosen.mb * (chosen.warm + chosen.steps)), world),
        weights=named,
    )


class Rows:
    """This rank's share of the benchmark's tokens, an update's at a time."""

    def __init__(self, data: torch.Tensor, world: Any) -> None:
        self.batches, self.world = iter(data.split(chosen.mb)), world
        self.tokens, self.waited = chosen.mb * chosen.seq // world.size, 0.0

    def take(self, micros: int) -> list[Any]:
        from decoder import batch

        rows = next(self.batches).chunk(self.world.size)[self.world.rank]
        return [batch(block) for block in rows.chunk(micros)]

    def state(self) -> dict[str, int]:
        return {}

    def seek(self, state: Mapping[str, int]) -> None: ...

    def close(self) -> None: ...


if __name__ == "__main__":
    main()
