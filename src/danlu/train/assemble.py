"""A recipe becomes a run. The only place that knows the order:

tokenizer -> data -> model on no memory -> shard -> memory -> initial or given weights -> the three layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from danlu.compute.layer import ComputeLayer
from danlu.compute.mesh import Parallel
from danlu.compute.shard import materialise, shard
from danlu.core import device as devices
from danlu.core.errors import InputError
from danlu.core.world import World
from danlu.data.source import Held, Rows
from danlu.data.tokenizer import Tokenizer
from danlu.data.tokenizer import load as load_tokenizer
from danlu.memory.layer import MemoryLayer
from danlu.memory.plan import Footprint, rows_that_fit
from danlu.memory.precision import Precision, choose
from danlu.models import weights
from danlu.models.count import parameters as count_parameters
from danlu.models.families import Family, Pretrained, check_vocabulary, model_folder
from danlu.models.roles import roles
from danlu.models.shape import Shape
from danlu.models.stack import plain
from danlu.models.start import fill
from danlu.optim.layer import OptimLayer
from danlu.recipe.recipe import Recipe
from danlu.train.data import open_sets
from danlu.train.run import Run

PROBE = "The quick brown fox, 42 times: 红楼梦."  # a text by which tokenizers are told apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Materials:
    """Everything a run is made of, before any weight has memory: what `check` shows and `build` puts together.

    recipe   resolved: no `auto` is left
    total    updates of the whole run
    start    the folder that the weights come from; None: they are drawn
    """

    recipe: Recipe
    world: World
    device: torch.device
    precision: Precision
    tokenizer: Tokenizer
    family: Family
    start: Path | None
    rows: Rows
    held: Held | None
    total: int
    footprint: Footprint
    data_id: str
    fallbacks: tuple[str, ...] = ()

    @property
    held_id: str = ""
    def micros(self) -> int:
        """Micro-batches of an update on each rank."""
        batch = self.recipe.batch
        return batch.global_batch_size // self.world.size // int(batch.micro_batch_size)


def gather(recipe: Recipe, *, world: World, device: torch.device, announce: Callable[[str], None]) -> Materials:
    """Everything that can be known before weights have memory, each `auto` settled and each size checked."""
    precision = choose(recipe.memory.precision, device)
    parallel = recipe.parallel.over(world.size)
    tokenizer = load_tokenizer(recipe.data.tokenizer)
    family, start = _family(recipe, tokenizer)
    if start is not None:
        _tell_of_other_ids(start, recipe.data.tokenizer, tokenizer, announce)
    shape = family.shape()
    footprint = _footprint(shape, recipe.data.sequence_length, precision)
    micro = _micro_batch(recipe, parallel, footprint, device)
    data = recipe.data
    cache = Path(recipe.folder) / ".cache"
    sets = open_sets(data, tokenizer, vocab_size=shape.vocab_size, cache=cache, world=world, announce=announce)
    common: dict[str, Any] = {
        "sequence_length": data.sequence_length,
        "pad_id": tokenizer.pad_id,
        "packing": data.packing,
        "vocab_size": shape.vocab_size,
        "rank": world.rank,
        "size": world.size,
        "pin": device.type == "cuda",
    }
    rows = Rows(
        sets.train,
        global_batch_size=recipe.batch.global_batch_size,
        seed=recipe.seed,
        epochs=recipe.num_train_epochs,
        workers=data.workers,
        prefetch=data.prefetch,
        **common,
    )
    held = Held(sets.validation, batch_size=micro, **common) if sets.validation else None
    resolved = replace(
        recipe,
        model=family if start is None else recipe.model,
        batch=replace(recipe.batch, micro_batch_size=micro),
        memory=replace(recipe.memory, precision=precision.name),
        parallel=parallel,
    )
    return Materials(
        recipe=resolved,
        world=world,
        device=device,
        precision=precision,
        tokenizer=tokenizer,
        family=family,
        start=start,
        rows=rows,
        held=held,
        total=_updates(recipe, rows),
        footprint=footprint,
        data_id=sets.identity,
        held_id=sets.held,
        fallbacks=remarks(recipe.memory.precision, precision, device, shape.sides),
    )


def refuse(recipe: Recipe, *, ranks: int) -> None:
    """Raises InputError for what can be known to be wrong with so many ranks before any of them starts."""
    parallel = recipe.parallel.over(ranks)
    _family(recipe, load_tokenizer(recipe.data.tokenizer))
    _share(recipe, parallel)


def build(materials: Materials) -> Run:
    """The run at its first step: weights have memory and values, the three layers hold them."""
    recipe, world, device = materials.recipe, materials.world, materials.device
    with torch.device("meta"):
        model = materials.family.build()
    if world.size > 1:
        shard(model, model.blocks.values(), mesh=recipe.parallel.mesh(device.type))
    materialise(model, device=device, dtype=materials.precision.weights)
    if materials.start is None:
        fill(model, recipe.seed)
    else:
        weights.copy(model, weights.load(materials.start)[1])
    named = {plain(name): parameter for name, parameter in model.named_parameters()}
    return Run(
        compute=ComputeLayer(model, world=world, device=device),
        memory=MemoryLayer(device=device, precision=materials.precision),
        optim=OptimLayer(recipe.optimizer, named.items(), total=materials.total, roles=roles(model)),
        objective=recipe.objective,
        source=materials.rows,
        weights=named,
    )


def _family(recipe: Recipe, tokenizer: Tokenizer) -> tuple[Family, Path | None]:
    """The model's family with its vocabulary settled, and where its weights come from."""
    start = None
    if isinstance(recipe.model, Pretrained):
        start = Path(recipe.model.from_)
        family: Family = weights.load(start, announce=False)[0]  # names and shapes fit, before hours of tokenising
    else:
        family = recipe.model
    if family.vocab_size == "auto":
        family = replace(family, vocab_size=tokenizer.vocab_size)
    check_vocabulary(family, tokenizer.vocab_size, tokenizer=recipe.data.tokenizer)
    positions = family.shape().max_positions
    if recipe.data.sequence_length > positions:
        raise InputError(
            f"data.sequence_length is {recipe.data.sequence_length}, but the model has {positions} positions"
        )
    return family, start


def _fallbacks(recipe: Recipe, precision: Precision, device: torch.device) -> tuple[str, ...]:
    """What the device cannot do and is done otherwise, a sentence each."""
    if recipe.memory.precision == "auto" and precision.name == "fp32":
        return (f"memory.precision auto: fp32, since this {device.type} does not multiply bf16 natively",)
    return ()


def _tell_of_other_ids(start: Path, named: str, tokenizer: Tokenizer, announce: Callable[[str], None]) -> None:
    """A model that comes with a tokenizer of its own, by which a text has other ids, is told of: nothing else would."""
    folder = model_folder(start)
    if folder.resolve() == Path(named).resolve():
        return
    try:
        own = load_tokenizer(str(folder))
    except InputError:
        return  # it comes with none, or with one that cannot be read here
    if own.encode(PROBE) != tokenizer.encode(PROBE):
        announce(
            f"warning: {start} comes with a tokenizer of its own, by which texts have other ids than by {named}: to "
            f"its weights they are noise. Say data.tokenizer: {folder}, unless they are to learn new ids."
        )


def _updates(recipe: Recipe, rows: Rows) -> int:
    """Updates of the whole run, from whichever of the three lengths the recipe gives."""
    if recipe.max_steps is not None:
        return recipe.max_steps
    if recipe.max_tokens is not None:
        return math.ceil(recipe.max_tokens / (recipe.batch.global_batch_size * recipe.data.sequence_length))
    assert rows.updates is not None
    return rows.updates


def _footprint(shape: Shape, sequence_length: int, precision: Precision) -> Footprint:
    return Footprint(
        parameters=count_parameters(shape),
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.inner_size,
        layers=shape.layers,
        query_size=shape.heads * shape.head_dim,
        key_size=shape.key_value_heads * shape.head_dim,
        sequence_length=sequence_length,
        product_bytes=precision.products.itemsize,
        weight_bytes=precision.weights.itemsize,
    )


def _share(recipe: Recipe, parallel: Parallel) -> int:
    """Rows of an update on one rank; refused where ranks cannot share them, or micro-batches do not divide them."""
    ranks, batch = parallel.ranks, recipe.batch
    if batch.global_batch_size % ranks:
        raise InputError(
            f"batch.global_batch_size is {batch.global_batch_size}, which {ranks} ranks cannot share evenly; "
            f"{-(-batch.global_batch_size // ranks) * ranks} would do"
        )
    share = batch.global_batch_size // ranks
    if batch.micro_batch_size != "auto" and share % batch.micro_batch_size:
        would = [size for size in range(1, share + 1) if share % size == 0]
        raise InputError(
            f"batch.micro_batch_size is {batch.micro_batch_size}, which does not divide the {share} rows of a rank; "
            f"one of {', '.join(map(str, would))} would do, or auto"
        )
    return share


def _micro_batch(recipe: Recipe, parallel: Parallel, footprint: Footprint, device: torch.device) -> int:
    """Rows of one forward: the recipe's, or as many as fit."""
    share, given = _share(recipe, parallel), recipe.batch.micro_batch_size
    if given != "auto":
        return given
    free = devices.memory(device).free // (parallel.ranks if device.type == "cpu" else 1)
    return rows_that_fit(footprint, rows=share, free_bytes=free, shards=int(parallel.shard))
