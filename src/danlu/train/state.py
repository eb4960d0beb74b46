"""What a checkpoint holds of a run, and a run gone back to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from danlu.checkpoint.load import Found, Want, portions, read, streams
from danlu.checkpoint.save import Piece, Snapshot
from danlu.compute.shard import Slice, held
from danlu.core.errors import InputError
from danlu.core.log import logger
from danlu.optim.own import part
from danlu.train.run import Run

WEIGHTS, MOMENTS = "weights/", "optimizer/"  # before a weight's name; before a moment's kind and its weight's name
RANDOM = "torch"  # nothing of ours draws from torch's own stream; it is kept for parts that outsiders bring


def snapshot(run: Run, *, facts: Mapping[str, Any], metric: float | None, due: bool = True) -> Snapshot:
    """All that the run needs to go on from here; what many ranks hold is given by the first of them."""
    slices = {key: part for key, part in _slices(run).items() if part.first and part.local.numel()}
    counters = {"step": run.step, "tokens": run.tokens, "skipped": run.skipped, "source": run.source.state()}
    counters["memory"] = run.memory.state()
    counters["noise"] = run.noise.state() if run.noise else None
    return Snapshot(
        step=run.step,
        pieces={
            key: Piece(tensor=part.local, shape=part.shape, offset=part.offset, still=_still(run, key))
            for key, part in slices.items()
        },
        facts={**facts, "run": counters},
        streams={RANDOM: torch.get_rng_state()},
        metric=metric,
        due=due,
    )


def restore(run: Run, found: Found) -> None:
    """The run is where it was when the checkpoint was made: weights, moments, position, counters, random streams.

    Everything is matched by name; what is missing, unknown or of another shape is refused, all in one message.
    """
    run.compute.release()
    weights = {WEIGHTS + name: held(parameter, rank=0) for name, parameter in run.weights.items()}
    wanted = {
        key: Want(part.shape, part.offset, tuple(part.local.shape), part.local.dtype) for key, part in weights.items()
    }
    stored = {part.name for table in found.tables for part in table.pieces}
    _refuse_gaps(found, stored, run)
    moved = {_weight_of(key) for key in stored if key.startswith(MOMENTS)} & run.optim.weights.keys()
    for name in sorted(moved):
        weight = weights[WEIGHTS + name]
        for kind, kept in run.optim.kept(name).items():
            sizes, offset = part(kept, weight.shape, weight.local.shape, weight.offset)
            wanted[f"{MOMENTS}{kind}/{name}"] = Want(kept.shape, offset, sizes, kept.dtype)

    def moments() -> Iterator[dict[str, Tensor]]:
        for tensors in portions(found, wanted):
            for key in weights.keys() & tensors.keys():
                weights[key].local.copy_(tensors.pop(key))
            yield {key.removeprefix(MOMENTS): tensor for key, tensor in tensors.items()}

    run.optim.restore(moments())
    _restore_counters(run, found)


def _refuse_gaps(found: Found, stored: Iterable[str], run: Run) -> None:
    """Raises InputError where moments are missing that the updates made so far must have left.

    A weight that never had a gradient has none at all, which is said; one that has some has all kinds.
    """
    have: dict[str, set[str]] = {}
    for key in stored:
        if key.startswith(MOMENTS):
            have.setdefault(_weight_of(key), set()).add(key.split("/")[1])
    kinds = {name: run.optim.kept(name).keys() for name in run.weights.keys() & run.optim.weights.keys()}
    missing = [
        f"{MOMENTS}{kind}/{name}" for name, some in have.items() for kind in sorted(kinds.get(name, some) - some)
    ]
    counters = found.manifest.facts.get("run", {})
    if any(kinds.values()) and not have and counters.get("step", 0) > counters.get("skipped", 0):
        missing = ["the optimiser's state of every weight"]
    if missing:
        raise InputError(f"{found.path}: a part of the run's state is missing: {', '.join(missing)}")
    if have and (without := sorted(run.weights.keys() - have.keys())):
        logger.warning("%s: no optimiser state for %s: no gradient had reached it", found.path, ", ".join(without))


def restore_weights(run: Run, found: Found) -> None:
    """The weights are the checkpoint's; nothing else has moved."""
    run.compute.release()
    weights = {WEIGHTS + name: held(parameter, rank=0) for name, parameter in run.weights.items()}
    wanted = {key: Want(p.shape, p.offset, tuple(p.local.shape), p.local.dtype) for key, p in weights.items()}
    others = {part.name for table in found.tables for part in table.pieces} - wanted.keys()
    for key, tensor in read(found, wanted, elsewhere=others).items():
        weights[key].local.copy_(tensor)


def _restore_counters(run: Run, found: Found) -> None:
    try:
        counters = found.manifest.facts["run"]
        run.step, run.tokens, run.skipped = counters["step"], counters["tokens"], counters["skipped"]
        run.source.seek(counters["source"])
        run.memory.restore(counters.get("memory", {}))
        if run.noise is not None and counters.get("noise"):
            run.noise.restore(counters["noise"])
    except KeyError as error:
        raise InputError(f"{found.path}: its facts hold no {error}; it was not written by a run of danlu") from None
    except InputError as error:
        raise InputError(f"{found.path}: {error}") from None
    states = streams(found, run.compute.world.rank, run.compute.world.size)
    if states is None:
        return  # another number of ranks: each begins a stream of its own
    if RANDOM not in states:
        raise InputError(f"{found.path}: a part of the run's state is missing: the random stream {RANDOM!r}")
    torch.set_rng_state(states[RANDOM])


def _slices(run: Run) -> dict[str, Slice]:
    rank = run.compute.world.rank
    weights = {WEIGHTS + name: held(parameter, rank=rank) for name, parameter in run.weights.items()}
    return weights | {MOMENTS + key: held(value, rank=rank) for key, value in run.optim.state().items()}


def _still(run: Run, key: str) -> bool:
    """Whether nobody writes to what this is the name of, as long as it is held."""
    return key.startswith(MOMENTS) and run.optim.still(key.removeprefix(MOMENTS))


def _weight_of(key: str) -> str:
    """optimizer/exp_avg/blocks.0.norm.weight -> blocks.0.norm.weight"""
    return key.split("/", 2)[-1]
