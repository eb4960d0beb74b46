"""Whether a run's blocks are compiled, settled once; and blocks compiled as it was settled."""

from __future__ import annotations

import torch

from danlu.compute import compile as compiling
from danlu.compute import graphs
from danlu.compute.compile import Choice, Compiled, Costs
from danlu.core import device as devices
from danlu.core import world as worlds
from danlu.core.log import logger
from danlu.core.world import World
from danlu.memory.precision import Precision
from danlu.models import attention, count
from danlu.models.shape import Shape
from danlu.models.stack import Trunk
from danlu.recipe.recipe import Recipe


def settle(
    recipe: Recipe,
    *,
    shape: Shape,
    precision: Precision,
    micro: int,
    rows: int,
    updates: int,
    world: World,
    device: torch.device,
) -> Choice:
    """What `compile` comes to, the same on every rank. rows: of an update; updates: of the run; micro: of a forward."""
    length = recipe.data.sequence_length
    costs = _costs(recipe, shape=shape, precision=precision, micro=micro, device=device)
    return worlds.once(
        world,
        lambda: compiling.choose(
            recipe.compile,
            device=device,
            ranks=world.size,
            updates=updates,
            flops=count.flops_per_token(shape, length) * rows * length / world.size,
            peak=lambda: devices.peak_flops(device, precision.products),
            cost=costs.expected(device),
        ),
    )


def compiled(
    model: Trunk, choice: Choice, recipe: Recipe, *, precision: Precision, world: World, device: torch.device
) -> list[str]:
    """The model's blocks run as `choice` says. Compiled code outlives the process, in the user's cache.

    Gives where it will be noted what compiling took, or why it failed.
    """
    told: list[str] = []
    if not choice.on:
        return told
    worlds.keep_compiled()
    if attention.choose(device, precision.attention, recipe.data.sequence_length) == "loop":
        model.path = "mask"  # a loop over documents would be compiled anew for each layout of a row
    micro = int(recipe.batch.micro_batch_size)
    costs = _costs(recipe, shape=model.shape, precision=precision, micro=micro, device=device)

    def tell(text: str) -> None:
        logger.info("%s", text)
        told.append(text)

    Compiled(
        model.blocks.values(),
        say=tell,
        rows=micro,  # a batch that grows comes in smaller ones first
        again=recipe.memory.recompute == "none",  # or what is made again is said already
        done=costs.keep if world.first else lambda seconds: None,
        backend=compiling.BACKEND,
        options=graphs.OPTIONS if choice.compile == "graphs" else None,
    )
    return told


def _costs(recipe: Recipe, *, shape: Shape, precision: Precision, micro: int, device: torch.device) -> Costs:
    """What compiling this very code cost before: all that decides it is named, but for the number of blocks."""
    facts = (shape.hidden_size, shape.inner_size, shape.heads, shape.key_value_heads, shape.gated, shape.norm)
    sizes = (micro, recipe.data.sequence_length, recipe.data.packing, recipe.memory.recompute)
    return Costs(worlds.compiled_folder(), *facts, *sizes, precision.name, devices.name_of(device))
