"""A recipe becomes a run. The only place that knows the order:

tokenizer -> data -> model on no memory -> shard -> memory -> initial or given weights -> the three layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from danlu.compute.compile import Choice
from danlu.compute.layer import ComputeLayer
from danlu.compute.mesh import Parallel
from danlu.compute.shard import held, materialise, shard
from danlu.core.device import backend_for
from danlu.core.errors import InputError
from danlu.core.world import World, alone, be_deterministic, once
from danlu.data.source import Held, Rows
from danlu.data.tokenizer import Tokenizer
from danlu.data.tokenizer import load as load_tokenizer
from danlu.memory import offload, recompute
from danlu.memory.activations import Activations
from danlu.memory.layer import MemoryLayer
from danlu.memory.ledger import Case
from danlu.memory.offload import Offload
from danlu.memory.precision import Precision, apply, choose, remarks
from danlu.memory.rounding import Place, Stochastic
from danlu.memory.scale import Scale
from danlu.memory.states import StatesAway
from danlu.models import weights
from danlu.models.families import Family, Pretrained, check_vocabulary, model_folder
from danlu.models.roles import roles
from danlu.models.stack import plain
from danlu.models.start import fill
from danlu.monitor.noise import NoiseScale
from danlu.optim.layer import OptimLayer
from danlu.recipe.recipe import Recipe
from danlu.train import compiling, forecast
from danlu.train.data import LeftOut, Sets, open_sets
from danlu.train.forecast import Sizes
from danlu.train.run import Run

PROBE = "The quick brown fox, 42 times: 红楼梦."  # a text by which tokenizers are told apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Materials:
    """Everything a run is made of, before any weight has memory: what `check` shows and `build` puts together.

    recipe   resolved: no `auto` is left
    total    updates of the whole run
    start    the folder that the weights come from; None: they are drawn
    sizes    what decides the bytes of an update, for any micro-batch; untried: the micro-batch is a forecast's
    offload  what is kept elsewhere than on the device
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
    sizes: Sizes
    data_id: str
    compiled: Choice
    held_id: str = ""
    left_out: tuple[LeftOut, ...] = ()
    fallbacks: tuple[str, ...] = ()
    untried: bool = False
    offload: Offload = Offload()

    @property
    def case(self) -> Case:
        """What decides the bytes of an update on each rank."""
        return self.sizes(int(self.recipe.batch.micro_batch_size))

    @property
    def micros(self) -> int:
        """Micro-batches of an update on each rank."""
        batch = self.recipe.batch
        return self.rows.global_batch_size // self.world.size // int(batch.micro_batch_size)


def gather(recipe: Recipe, *, world: World, device: torch.device, announce: Callable[[str], None]) -> Materials:
    """Everything that can be known before weights have memory, each `auto` settled and each size checked."""
    if recipe.deterministic:
        be_deterministic()
    precision = choose(recipe.memory.precision, device, recipe.memory.roles)
    parallel = recipe.parallel.over(world.size)
    away = offload.choose(recipe.memory.offload, recipe.memory.offload_folder, device)
    tokenizer = load_tokenizer(recipe.data.tokenizer)
    family, start = _family(recipe, tokenizer)
    if start is not None:
        _tell_of_other_ids(start, recipe.data.tokenizer, tokenizer, announce)
    shape = family.shape()
    share, given = _share(recipe, parallel), recipe.batch.micro_batch_size
    sizes = forecast.sizes(recipe, family, precision, parallel, device, share=share, away=away)
    micro = once(world, lambda: forecast.fitting(sizes, parallel, device, share=share)) if given == "auto" else given
    data = recipe.data
    cache = Path(recipe.folder) / ".cache"
    sets = open_sets(data, tokenizer, vocab_size=shape.vocab_size, cache=cache, world=world, announce=announce)
    rows, held = _read(recipe, sets, tokenizer, vocab_size=shape.vocab_size, micro=micro, world=world, device=device)
    total, full = _updates(recipe, rows), rows.global_batch_size
    compiled = compiling.settle(
        recipe, shape=shape, precision=precision, micro=micro, rows=full, updates=total, world=world, device=device
    )
    resolved = replace(
        recipe,
        compile=compiled.compile,
        model=family if start is None else recipe.model,
        batch=replace(recipe.batch, global_batch_size=rows.global_batch_size, micro_batch_size=micro),
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
        total=total,
        sizes=sizes,
        untried=given == "auto",
        data_id=sets.identity,
        compiled=compiled,
        held_id=sets.held,
        left_out=sets.left_out,
        fallbacks=(
            *remarks(
                recipe.memory.precision,
                precision,
                device,
                shape.sides,
                given=None if start is None else weights.stored_dtype(start),
            ),
            *away.said,
        ),
        offload=away,
    )


def _read(
    recipe: Recipe,
    sets: Sets,
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    micro: int,
    world: World,
    device: torch.device,
) -> tuple[Rows, Held | None]:
    """The rows that are learned, and those that are held out, if there are."""
    data = recipe.data
    common: dict[str, Any] = {
        "sequence_length": data.sequence_length,
        "pad_id": tokenizer.pad_id,
        "packing": data.packing,
        "vocab_size": vocab_size,
        "rank": world.rank,
        "size": world.size,
        "pin": device.type == "cuda",
    }
    rows = Rows(
        sets.train,
        global_batch_size=recipe.batch.rows(data.sequence_length),
        ramp=recipe.batch.ramp,
        seed=recipe.seed,
        epochs=recipe.num_train_epochs,
        workers=data.workers,
        prefetch=data.prefetch,
        **common,
    )
    return rows, Held(sets.validation, batch_size=micro, **common) if sets.validation else None


def refuse(recipe: Recipe, *, ranks: int) -> None:
    """Raises InputError for what can be known to be wrong with so many ranks before any of them starts."""
    parallel = recipe.parallel.over(ranks)
    offload.choose(recipe.memory.offload, recipe.memory.offload_folder, torch.device("cpu"))
    _family(recipe, load_tokenizer(recipe.data.tokenizer))
    _share(recipe, parallel)


def build(materials: Materials) -> Run:
    """The run at its first step: weights have memory and values, the three layers hold them."""
    recipe, world, device = materials.recipe, materials.world, materials.device
    with torch.device("meta"):
        model = materials.family.build()
    apply(model, materials.precision)
    recompute.apply(model, materials.case.kinds)
    noted = compiling.compiled(
        model, materials.compiled, recipe, precision=materials.precision, world=world, device=device
    )
    shards, away = None, materials.offload
    if away.weights:
        alone(backend=backend_for(device))
    if world.size > 1 or away.weights:
        mesh, zero, stored = recipe.parallel.mesh(device.type), recipe.parallel.zero, materials.precision.weights
        shards = shard(model, model.blocks.values(), mesh=mesh, zero=zero, weights=stored, offload=away.policy())
    home = torch.device("cpu") if away.weights else device
    materialise(model, device=home, dtype=materials.precision.weights)
    if materials.start is None:
        fill(model, recipe.seed)
    else:
        weights.copy(model, weights.load(materials.start)[1])
    named = {plain(name): parameter for name, parameter in model.named_parameters()}
    precision = materials.precision
    scale = Scale(recipe.memory.loss_scale) if precision.scaled else None
    kept = Activations(device, named.values()) if away.activations else None
    memory = MemoryLayer(device=device, precision=precision, weights=named.values(), scale=scale, activations=kept)
    optim = OptimLayer(
        recipe.optimizer,
        named.items(),
        total=materials.total,
        roles=roles(model),
        carry=_rounding(materials, named),
    )
    _keep_states(materials, optim)
    graphed = materials.compiled.compile == "graphs"
    return Run(
        compute=ComputeLayer(
            model, world=world, device=device, upstream=memory.upstream, shards=shards, graphed=graphed, noted=noted
        ),
        memory=memory,
        optim=optim,
        objective=recipe.objective,
        source=materials.rows,
        weights=named,
        noise=_noise(materials),
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


def _rounding(materials: Materials, named: Mapping[str, nn.Parameter]) -> Stochastic | None:
    """How updates are carried out where weights are stored in bf16; None: as torch's optimiser does."""
    if not materials.precision.pure:
        return None
    parts = {name: held(parameter, rank=0) for name, parameter in named.items()}
    places = {named[name]: Place(name, part.shape, part.offset) for name, part in parts.items()}
    return Stochastic(materials.recipe.seed, places)


def _keep_states(materials: Materials, optim: OptimLayer) -> None:
    """The optimiser's states will lie where the recipe wants them, and there is room for them."""
    place = materials.offload.place()
    if place is None:
        return
    settings, shards = materials.recipe.optimizer, int(materials.recipe.parallel.shard)
    forms = [
        settings.states(weight.shape, dtype=weight.dtype, role=optim.roles[name])
        for name, weight in optim.weights.items()
    ]
    place.reserve(-(-kept.bytes // shards) for kinds in forms for kept in kinds.values() if kept.shape)
    # What rounds by a number's place in its weight is not shown slices.
    sliced = settings.elementwise and not materials.precision.pure
    optim.states = StatesAway(optim.torch, place, elementwise=sliced, move=optim.carry)


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


def _noise(materials: Materials) -> NoiseScale | None:
    """Where the gradient's noise is measured, what is known of it."""
    every = materials.recipe.monitor.noise_steps
    return None if every is None else NoiseScale(every=every)


def _updates(recipe: Recipe, rows: Rows) -> int:
    """Updates of the whole run, from whichever of the three lengths the recipe gives."""
    if recipe.max_steps is not None:
        return recipe.max_steps
    if recipe.max_tokens is not None:
        return rows.sizes.updates(math.ceil(recipe.max_tokens / recipe.data.sequence_length))
    assert rows.updates is not None
    return rows.updates


def _share(recipe: Recipe, parallel: Parallel) -> int:
    """Rows of an update on one rank; refused where ranks cannot share them, or micro-batches do not divide them."""
    ranks, batch = parallel.ranks, recipe.batch
    rows = batch.rows(recipe.data.sequence_length)
    if rows % ranks:
        would = -(-rows // ranks) * ranks
        asked, tokens = f"batch.global_batch_size is {rows}", batch.global_batch_tokens
        if tokens is not None:
            asked = f"batch.global_batch_tokens is {tokens}, {rows} rows"
            would *= recipe.data.sequence_length
        raise InputError(f"{asked}, which {ranks} ranks cannot share evenly; {would} would do")
    share = rows // ranks
    if recipe.monitor.noise_steps is not None and share == 1:
        raise InputError(
            "monitor.noise_steps: an update of one row on each rank has no parts whose noise could be compared; "
            "a larger batch would do, or null"
        )
    if batch.micro_batch_size != "auto" and share % batch.micro_batch_size:
        divisors = [size for size in range(1, share + 1) if share % size == 0]
        raise InputError(
            f"batch.micro_batch_size is {batch.micro_batch_size}, which does not divide the {share} rows of a rank; "
            f"one of {', '.join(map(str, divisors))} would do, or auto"
        )
    return share
