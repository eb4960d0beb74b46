"""A run begins: its folder is opened and compared with what is asked, and what watches it is told of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from danlu.checkpoint.load import Found, candidates
from danlu.checkpoint.lock import Lock
from danlu.core import world as worlds
from danlu.core.config import changed, differences
from danlu.core.errors import InputError
from danlu.core.log import logger
from danlu.core.paths import RunFolder, shown, write_whole
from danlu.core.world import World
from danlu.memory.precision import table
from danlu.models import attention, blockwise, count, product
from danlu.monitor import environment, jsonl
from danlu.monitor.watch import Guard, Plan, Watch, watch
from danlu.optim.told import moments
from danlu.recipe.recipe import DURATIONS, Recipe, resumes
from danlu.recipe.yaml import load
from danlu.train import peak
from danlu.train.assemble import Materials
from danlu.train.run import Run


class Opened(NamedTuple):
    """The recipe that a run goes by, and which settings changed since it was there last."""

    recipe: Recipe
    changes: tuple[str, ...]


def move_aside(folder: RunFolder, announce: Callable[[str], None]) -> None:
    """The old run, if there is one and nobody is at work in it, has another name."""
    if not folder.root.is_dir():
        return
    with Lock(folder.lock):
        name = f"{folder.root.name}-before-{time.strftime('%Y%m%d-%H%M%S')}"
        names = (folder.root.with_name(name + more) for more in ("", *(f"-{n}" for n in range(2, 100))))
        aside = next(path for path in names if not path.exists())
        folder.root.rename(aside)
    announce(f"{folder.root.name}: the old run was moved to {aside}")


@contextmanager
def locked(folder: RunFolder, world: World) -> Iterator[None]:
    """No other run is at work in the folder; the first rank holds it for all."""

    def take() -> Lock:
        try:
            return Lock(folder.lock)
        except OSError as error:
            raise InputError(
                f"{folder.root}: no run can be kept there ({error.strerror}: {error.filename}); "
                "give it another place with folder=…"
            ) from None

    lock = worlds.first_only(world, take)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def open_folder(recipe: Recipe, folder: RunFolder, *, ranks: int, announce: Callable[[str], None]) -> Opened:
    """The recipe that the run goes by: this one, with every `auto` as it was settled when the run began.

    A folder of another recipe is refused with the differences; those that a run may change on its way are announced.
    """
    if not folder.recipe.exists():
        if candidates(folder.checkpoints):
            raise InputError(f"{folder.root}: holds checkpoints but no recipe.yaml; put it back, or use --restart")
        return Opened(recipe, ())
    old = load(str(folder.recipe))
    for path, before, after in differences(old, recipe):
        if after == "auto" and not _settled_anew(path, old, ranks):
            recipe = changed(recipe, path, before)
    allowed, refused = resumes(old, recipe)
    if refused:
        listed = "\n".join(f"  {path}: {before} there, {after} now" for path, before, after in refused)
        raise InputError(
            f"{folder.root} is the folder of another recipe:\n{listed}\n"
            "give this run another name, or use --restart to move the old folder aside and begin anew"
        )
    for path, before, after in allowed:
        if after != "auto":
            announce(f"{path}: was {before}, is {after} from here on")
    return Opened(recipe, tuple(path for path, _, _ in allowed))


def _settled_anew(path: str, old: Recipe, ranks: int) -> bool:
    """Whether `auto` may come to something else than when the run began: it follows the number of ranks."""
    return path.startswith("parallel.") or (path == "batch.micro_batch_size" and ranks != old.parallel.ranks)


def over(opened: Opened, found: Found | None) -> bool:
    """Whether the run came to its end, its last update or early stopping, and nothing asks for more of it."""
    if found is None or not found.manifest.facts.get("over"):
        return False
    now = asked(opened.recipe)
    more = any(path in DURATIONS or path.startswith("evaluate.early_stopping") for path in opened.changes)
    return not more and found.manifest.facts.get("asked", now) == now


def asked(recipe: Recipe) -> dict[str, Any]:
    """What decides where a run ends, as JSON: kept in checkpoints, for recipe.yaml may already ask for more."""
    early = recipe.evaluate.early_stopping
    lengths = {path: getattr(recipe, path) for path in DURATIONS}
    return lengths | {"early_stopping": early and [early.patience, early.min_delta]}


def published(folder: RunFolder, found: Found | None, recipe: Recipe) -> bool:
    """Whether the model in the run's folder is the one that this checkpoint ends with: published since it was saved."""
    step, done = found and found.step, False
    for event in jsonl.lines(folder.events):
        if event.get("step") == step and event.get("event") in ("saved", "published"):
            done = event["event"] == "published" and event.get("weights") == recipe.checkpoint.publish
    return done and folder.model.exists()


def same_data(materials: Materials, folder: RunFolder, found: Found | None) -> None:
    """A run goes on only with the text that it began with, wherever it lies now: raises InputError where any token of
    it has changed, or of the text that it is held against."""
    if found is None:
        return
    facts = found.manifest.facts
    for what, now, then in (
        ("training data", materials.data_id, facts.get("data_id")),
        ("validation data", materials.held_id, facts.get("held_id", materials.held_id)),
    ):
        if now != then:
            raise InputError(
                f"{folder.root}: the {what} is not what it was when the run began (id {now}, then {then}); "
                "put the old text back, or use --restart to begin anew"
            )


def open_watch(
    run: Run, materials: Materials, folder: RunFolder, found: Found | None, *, room: Callable[[int], str]
) -> Watch | Guard:
    """What watches the run, told of its length and cost; the record of this start is written."""
    recipe, shape = materials.recipe, materials.family.shape()
    held = materials.held is not None
    made = watch(
        recipe.monitor,
        folder,
        Plan(
            total_steps=materials.total,
            start_step=run.step,
            tokens=run.tokens,
            flops_per_token=count.flops_per_token(shape, recipe.data.sequence_length),
            dtype=materials.precision.products,
            eval_steps=recipe.evaluate.eval_steps if held else None,
            save_steps=recipe.checkpoint.save_steps,
            times_read=lambda updates: materials.rows.sizes.samples(updates) / materials.rows.rows,
            epochs=recipe.num_train_epochs,
            trained=_trained(run),
            peak_rate=recipe.optimizer.learning_rate,
            micro_batch_size=int(recipe.batch.micro_batch_size),
            workers=recipe.data.workers,
            prefetch=recipe.data.prefetch,
            title=recipe.name,
        ),
        world=materials.world,
        device=materials.device,
    )
    if materials.world.first:
        _tell(run, materials, folder, room)
    if found is None:
        made.event("started", total_steps=materials.total, world=materials.world.size)
        for file, records, listed in materials.left_out:
            text = f"{records} bad records of {file} were left out (data.on_bad: skip)."
            made.event("left_out", cause=text, records=records, listed=listed)
    else:
        made.event("resumed", checkpoint=found.path.name, skipped=list(found.skipped), world=materials.world.size)
        logger.info("%s: going on after update %d of %d", shown(folder.root), run.step, materials.total)
    return made


def _tell(run: Run, materials: Materials, folder: RunFolder, room: Callable[[int], str]) -> None:
    """What was chosen is said once, and stands in environment.json."""
    recipe, precision = materials.recipe, materials.precision
    logger.info("%s", room(sum(weight.nbytes for weight in run.weights.values()) + run.optim.bytes))
    kind = materials.device, materials.precision.attention, recipe.data.sequence_length
    packed = attention.choose(*kind)
    blocks = "; training: in blocks of queries" if materials.compiled.on and blockwise.serves(*kind) else ""
    for said in (*materials.fallbacks, *materials.offload.told(), materials.compiled.why):
        logger.info("%s", said)
    profile = recipe.monitor.profile
    if profile is not None and (missed := profile.missed(done=run.step, total=materials.total)):
        logger.warning("%s", missed)
    facts = environment.environment(
        device=materials.device,
        world_size=materials.world.size,
        precision=precision.name,
        attention=f"causal: scaled_dot_product_attention; packed rows: {packed}{blocks}",
        fallbacks=materials.fallbacks,
        data_id=materials.data_id,
        variables=worlds.variables(),
        extra={
            "roles": {
                line.role: {"stored": line.stored, "computed": line.computed}
                for line in table(
                    precision, moments=moments(recipe.optimizer, run.optim.groups, dtype=precision.weights)
                )
            },
            "compile": {"chosen": materials.compiled.compile, "why": materials.compiled.why},
            "fp32_products": "oneDNN" if materials.device.type == "cpu" and product.ONEDNN else "torch's choice",
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "memory": peak.facts(materials),
        },
    )
    write_whole(folder.environment, environment.content(facts))


def _trained(run: Run) -> float:
    """The share of the weights' numbers that are trained, 0 to 1."""
    weights = run.weights.values()
    return sum(weight.numel() for weight in weights if weight.requires_grad) / sum(w.numel() for w in weights)
