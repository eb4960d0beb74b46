"""`danlu check RECIPE key=value …`: everything short of training, so that a long run holds no surprise."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from danlu.core.words import duration, size

if TYPE_CHECKING:
    import torch

    from danlu.compute.mesh import Parallel
    from danlu.core.batch import Batch
    from danlu.data.tokenizer import Tokenizer
    from danlu.memory.ledger import Case
    from danlu.optim.groups import Group
    from danlu.recipe.recipe import Recipe
    from danlu.train.assemble import Materials
    from danlu.train.forecast import Sizes

COLOURS = (36, 33, 35, 32)  # of successive documents, on a terminal
FIRST_PLACES = 6  # of a row, shown token by token
MEASURED_UPDATES, MEASURED_SECONDS = 4, 20.0


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The verb and its options are known to the parser."""
    parser = subparsers.add_parser(
        "check",
        help="do everything short of training: data, one batch, memory, disk, time",
        description="Do everything short of training: the resolved recipe, what the data holds, one batch with its "
        "labels and boundaries, and what the run will need of memory, disk and time. Text is tokenised into the cache; "
        "nothing else is written.",
    )
    parser.add_argument("recipe", help="a shipped recipe's name, or a path")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="fields of the recipe, e.g. max_steps=100")
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="processes the run will have (default 1)")
    parser.add_argument("--quick", action="store_true", help="leave out the time forecast, which runs a few updates")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """All that can be known before a run stands on standard output; what would refuse the run refuses here."""
    import functools
    import sys

    from danlu.compute.mesh import Parallel
    from danlu.core import config, device, log, world
    from danlu.core.errors import InputError
    from danlu.core.paths import RunFolder
    from danlu.recipe.yaml import load
    from danlu.train.assemble import gather
    from danlu.train.begin import open_folder
    from danlu.train.trial import remedies

    if arguments.nproc < 1:
        raise InputError(f"--nproc {arguments.nproc}: at least one process is needed")
    log.start(rank=0, size=1)
    announce = functools.partial(print, flush=True)
    recipe = load(arguments.recipe, arguments.overrides)
    recipe = open_folder(recipe, RunFolder(recipe.run_folder), ranks=arguments.nproc, announce=announce).recipe
    layout = recipe.parallel.over(arguments.nproc)
    alone = config.changed(recipe, "parallel", Parallel())
    materials = gather(
        alone, world=world.World(), device=device.choose(), announce=lambda text: print(text, flush=True)
    )
    try:
        resolved = config.changed(materials.recipe, "parallel", layout)
        of, case = sized(recipe, materials, layout)
        resolved = config.changed(resolved, "batch.micro_batch_size", case.rows)
        tell("recipe, resolved", config.dump(resolved).splitlines())
        tell("run folder", folder(resolved, total=materials.total))
        tell("data", data(materials))
        batch = materials.rows.take(materials.micros)[0]
        tell("one batch", show(batch, materials.tokenizer, colour=sys.stdout.isatty()))
        tell("model", model(materials))
        tell("precision", precision(materials))
        tell("optimizer", optimizer(materials))
        tell("updates", updates(materials))
        tell(
            "memory",
            memory(
                case,
                layout,
                materials.device,
                remedies(case, of, recipe.memory, materials.device),
                compiled=materials.compiled.on,
            ),
        )
        if away := list(materials.offload.told()):
            tell("kept elsewhere", away)
        tell("disk", disk(resolved, materials))
        if not arguments.quick:
            materials.rows.seek({"samples": 0})
            tell("time", seconds(materials))
    finally:
        materials.rows.close()
    return 0


def tell(heading: str, lines: Iterator[str] | list[str]) -> None:
    """A heading and its lines, as soon as each is known."""
    print(f"\n{heading}", flush=True)
    for line in lines:
        print(f"  {line}".rstrip(), flush=True)


def folder(recipe: Recipe, *, total: int) -> Iterator[str]:
    """Where the run goes, and what is there."""
    from danlu.checkpoint.load import candidates
    from danlu.core.paths import RunFolder

    place = RunFolder(recipe.run_folder)
    steps = [int(found.name.rpartition("-")[2]) for found in candidates(place.checkpoints)]
    if not place.root.exists():
        yield f"{place.root}: new"
    elif not steps:
        yield f"{place.root}: exists, without a checkpoint; begins at update 1"
    elif max(steps) >= total:
        yield f"{place.root}: exists, and is finished after {max(steps)} updates"
    else:
        yield f"{place.root}: exists; goes on after update {max(steps)} of {total}"


def data(materials: Materials) -> Iterator[str]:
    """What there is to learn from, and what is held out."""
    tokenizer, settings = materials.tokenizer, materials.recipe.data
    yield f"tokenizer: {settings.tokenizer}, {tokenizer.vocab_size:,} ids, end of a document {tokenizer.eos_id}"
    for one in materials.rows.describe():
        yield (
            f"train: {one.name}: {one.documents:,} documents, {one.tokens:,} tokens, {one.rows:,} rows of "
            f"{settings.sequence_length}; {one.share:.1%} of what is drawn"
        )
    held = materials.held.describe() if materials.held else []
    for one in held:
        yield f"validation: {one.name}: {one.documents:,} documents, {one.tokens:,} tokens, {one.rows:,} rows"
    if not held:
        yield "validation: none; the run will not be measured"


def show(batch: Batch, tokenizer: Tokenizer, *, colour: bool) -> Iterator[str]:
    """A micro-batch in counts, and one row of it (with a boundary, where one has): as text, and token by token."""
    from danlu.core.batch import IGNORE

    rows, length = batch.tokens.shape
    asked = int((batch.labels != IGNORE).sum())
    yield f"{rows} rows of {length} tokens; {asked:,} labels, {rows * length - asked:,} places without one"
    row = next((number for number in range(rows) if batch.documents[number, -1] > 0), 0)
    tokens, labels, positions, documents = (
        values[row].tolist() for values in (batch.tokens, batch.labels, batch.positions, batch.documents)
    )
    starts = [place for place in range(length) if place == 0 or documents[place] != documents[place - 1]]
    pieces = f"{len(starts)} documents or pieces of them"
    yield f"row {row} (sample {batch.samples[row] or 'none: padding'}): {pieces}"
    for number, (start, stop) in enumerate(zip(starts, [*starts[1:], length])):
        text = " ".join(tokenizer.decode(tokens[start:stop], control=True).split())
        text = text if len(text) <= 160 else f"{text[:100]} … {text[-50:]}"
        shade = f"\x1b[{COLOURS[number % len(COLOURS)]}m{text}\x1b[0m" if colour else text
        yield f"  {start:>5}-{stop - 1:<5} {shade}"
    yield "  place  document  position  reads             is to predict"
    shown = {*range(FIRST_PLACES), *(place for start in starts[1:3] for place in (start - 1, start)), length - 1}
    for place in sorted(shown):
        if 0 <= place < length:
            reads = repr(tokenizer.decode([tokens[place]], control=True))
            asks = repr(tokenizer.decode([labels[place]], control=True)) if labels[place] != IGNORE else "-"
            yield f"  {place:>5}  {documents[place]:>8}  {positions[place]:>8}  {reads:<16}  {asks}"


def model(materials: Materials) -> Iterator[str]:
    """What is trained."""
    from danlu.models.count import flops_per_token

    shape, plan = materials.family.shape(), materials.case
    embedding = shape.vocab_size * shape.hidden_size
    yield f"{materials.family.kind}: {plan.parameters:,} parameters, {embedding:,} of them the embedding"
    yield f"start: {materials.start or f'drawn from seed {materials.recipe.seed}'}"
    flops = flops_per_token(shape, materials.recipe.data.sequence_length)
    yield f"{flops / 1e6:,.1f} MFLOP a token, forward and backward; {materials.precision.name} on {materials.device}"
    yield materials.compiled.why


def precision(materials: Materials) -> Iterator[str]:
    """What each role is stored in and computed in, and why; and what this device makes of it."""
    from danlu.memory.precision import table
    from danlu.optim.told import moments

    kept = moments(materials.recipe.optimizer, groups(materials), dtype=materials.precision.weights)
    lines = list(table(materials.precision, moments=kept))
    wide = max(5, *(len(line.stored) for line in lines))
    for line in lines:
        yield f"{line.role:<11} stored {line.stored:<{wide}} computed {line.computed:<8}  {line.why}"
    yield from materials.fallbacks


def optimizer(materials: Materials) -> Iterator[str]:
    """Which weights are updated alike: what decays, their rates, and what is kept of them on all ranks together."""
    from danlu.optim.told import lines

    settings = materials.recipe.optimizer
    return lines(settings, groups(materials), total=materials.total, dtype=materials.precision.weights)


def groups(materials: Materials) -> list[Group]:
    """The weights of the model, which have no memory yet, as they will be updated."""
    import torch

    from danlu.models.roles import roles
    from danlu.models.stack import plain
    from danlu.optim.groups import split

    settings = materials.recipe.optimizer
    with torch.device("meta"):
        model = materials.family.build()
    named = [(plain(name), weight) for name, weight in model.named_parameters()]
    return split(named, weight_decay=settings.weight_decay, roles=roles(model), rates=settings.rates)


def updates(materials: Materials) -> Iterator[str]:
    """How long the run is, in each measure."""
    recipe, total = materials.recipe, materials.total
    rows, sizes = materials.rows.global_batch_size, materials.rows.sizes
    samples = sizes.samples(total)
    epochs = samples / materials.rows.rows
    ramp = f" (the first of {sizes.at(0)})" if sizes.at(0) < rows else ""
    yield (
        f"{total:,} updates of {rows} rows{ramp}: {samples * recipe.data.sequence_length:,} tokens, {epochs:.2f} epochs"
    )
    warmup = recipe.optimizer.schedule.warmup_steps
    if warmup > total:
        yield f"WARNING: {warmup} updates of warm-up are more than the run has"
    if epochs > 20:
        yield f"WARNING: every row is read {epochs:.0f} times; more text or fewer updates would learn better"


def sized(recipe: Recipe, materials: Materials, layout: Parallel) -> tuple[Sizes, Case]:
    """What decides the bytes on one rank of the layout: for any micro-batch, and for the one that the run will have."""
    from danlu.train.forecast import fitting, sizes

    share, given = materials.rows.global_batch_size // layout.ranks, recipe.batch.micro_batch_size
    of = sizes(
        recipe,
        materials.family,
        materials.precision,
        layout,
        materials.device,
        share=share,
        away=materials.offload,
    )
    return of, of(fitting(of, layout, materials.device, share=share) if given == "auto" else given)


def memory(case: Case, layout: Parallel, device: torch.device, less: Iterator[str], *, compiled: bool) -> Iterator[str]:
    """What a rank will need, part by part, against what is there."""
    from danlu.core import device as devices
    from danlu.memory.ledger import forecast, kept
    from danlu.memory.recompute import saved, stretches

    ledger, found = forecast(case), devices.memory(device)
    here = layout.ranks if device.type == "cpu" else 1
    yield f"each of {layout.ranks} ranks: {case.micros} micro-batches of {case.rows} rows an update"
    yield f"about {size(ledger.peak)} of tensors each, most {ledger.moment}:"
    for part, number in sorted(ledger.parts.items(), key=lambda one: -one[1]):
        if number:
            yield f"  {part:<24} {size(number):>10}  {number / ledger.peak:>6.1%}"
    for blocks, kind in stretches(case.kinds):
        parts = {part: number for part, number in kept(case, kind).items() if number}
        told = ", ".join(f"{part} {size(number)}" for part, number in parts.items())
        total = size(sum(parts.values()))
        yield f"activations of {blocks}, recompute {kind}: {saved(kind)} kept, {total} each ({told})"
    if case.elsewhere:
        yield f"{size(case.elsewhere)} are not there but on the host or a disk (memory.offload)"
    yield f"{size(found.free // here)} of {size(found.total // here)} free"
    if compiled:
        yield "blocks are compiled, and keep less than blocks as written, for which this is counted"
    if ledger.peak * here > found.free:
        would = ", or ".join([*less, "a smaller data.sequence_length"])
        yield f"WARNING: more than is free; less would be needed with {would}"


def disk(recipe: Recipe, materials: Materials) -> Iterator[str]:
    """What checkpoints and the model will take, against what is there."""
    import shutil

    settings, optimizer, stored = recipe.checkpoint, recipe.optimizer, materials.precision.weights
    named = [(group.role, weight) for group in groups(materials) for weight in group.parameters.values()]
    weights = sum(weight.numel() * stored.itemsize for _, weight in named)
    states = (optimizer.kept(weight.shape, dtype=stored, role=role) for role, weight in named)
    each = weights + sum(one.bytes for kinds in states for one in kinds.values())
    made = -(-materials.total // settings.save_steps)
    kept = made if settings.kept is None else min(made, settings.kept)
    most = (kept + (0 if settings.kept is None else 1)) * each + weights  # the oldest goes once the newest is whole
    free = shutil.disk_usage(_there(recipe.run_folder)).free
    yield (
        f"{made:,} checkpoints of {size(each)}, "
        f"{'all' if settings.kept is None else f'at most {kept}'} kept; the model {size(weights)}"
    )
    yield f"at most {size(most)} of {size(free)} free"
    if most > free:
        yield "WARNING: not enough room; set checkpoint.keep_last lower, or folder to another disk"


def seconds(materials: Materials) -> Iterator[str]:
    """How long the run will take, from a few updates made here and thrown away."""
    import statistics

    from danlu.core.device import synchronize
    from danlu.train.assemble import build
    from danlu.train.peak import Peak
    from danlu.train.step import step

    run = build(materials)
    # Updates like most of the run's: of all rows, as after a ramp, and none in parts, by which noise is measured.
    run.source.seek({"samples": materials.rows.sizes.starts[-1]})
    run.noise = None
    taken: list[float] = []
    started, least = time.perf_counter(), 2 if materials.compiled.on else 1  # the first one compiles
    while len(taken) < least or (len(taken) <= MEASURED_UPDATES and time.perf_counter() - started < MEASURED_SECONDS):
        before = time.perf_counter()
        step(run, run.source.take(materials.micros))
        synchronize(materials.device)
        taken.append(time.perf_counter() - before)
    peak = Peak(run, materials, ahead=1)
    with peak.watching(run):
        report = step(run, run.source.take(materials.micros))
    peak.told(report)
    yield f"memory, one process: {peak.sentence()}"
    each = statistics.median(taken[1:] or taken)
    recipe = materials.recipe
    rows = materials.rows.global_batch_size
    yield (
        f"{each:.2f} s an update on one process here ({rows * recipe.data.sequence_length / each:,.0f} tokens/s, "
        f"median of {len(taken[1:] or taken)})"
    )
    measures = -(-materials.total // recipe.evaluate.eval_steps) if materials.held else 0
    evaluating = measures * (materials.held.rows if materials.held else 0) * each / rows / 3  # a forward is a third
    whole = materials.total * each + evaluating
    yield f"{materials.total:,} updates and {measures} evaluations: about {duration(whole)}"


def _there(path: Path) -> Path:
    """The nearest folder above a path that exists."""
    while not path.exists():
        path = path.parent
    return path
