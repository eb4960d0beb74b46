"""The run goes back: to a checkpoint from before its trouble, and on from there with other data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from danlu.checkpoint.folder import whole
from danlu.checkpoint.load import Found, open_checkpoint
from danlu.checkpoint.manifest import Damaged, step_name, verify
from danlu.core.errors import InputError
from danlu.core.log import logger
from danlu.eval.perplexity import evaluate
from danlu.monitor.causes import Likely
from danlu.monitor.spikes import Trouble
from danlu.train.run import Run
from danlu.train.state import restore

SOON = 32  # updates
FAR = 1.3  # times the loss of what was learned from last


def last_good(folder: Path, trouble: Trouble, rollbacks: Sequence[Mapping[str, Any]] = ()) -> Found | None:
    """The newest whole checkpoint from before the trouble, every byte of it looked at; None where there is none.

    A slow divergence may have begun before every checkpoint that is kept: then the oldest of them will do, unless the
    loss was never lower than at the start. A run in trouble again soon after it went back goes back further, if it can.
    What was saved only because the run left is passed by: it goes back as one that was never interrupted.
    """
    held = whole(folder) if folder.is_dir() else {}
    kept = sorted(step for step, manifest in held.items() if step < trouble.step and manifest.due)
    good = [step for step in reversed(kept) if step <= trouble.before]
    if rollbacks and trouble.step - (last := rollbacks[-1])["to"] <= max(SOON, 2 * (last["from"] - last["to"])):
        good = [step for step in good if step < last["to"]] or good
    if not good and trouble.kind == "rise" and trouble.before:
        good = kept[:1]
    for step in good:
        path = folder / step_name(step)
        try:
            problems = verify(path)
            if not problems:
                return open_checkpoint(path)
        except Damaged as damage:
            problems = [str(damage)]
        logger.warning("%s is not gone back to: %s", path.name, problems[0])
    return None


def standing(found: Found, trouble: Trouble) -> str:
    """What the checkpoint is to the trouble, in words: from before it, or perhaps not."""
    if found.step <= trouble.before:
        return "from before it"
    return f"the oldest that is kept, itself perhaps hurt: the loss was lowest at step {trouble.before}"


def go_back(
    run: Run, found: Found, trouble: Trouble, *, micros: int, at: Mapping[str, int], number: int
) -> dict[str, Any]:
    """The run is where the checkpoint was made, but for its data: samples read since then are passed over.

    at: the data's position before the update that showed the trouble. Gives the record of it, the same on every rank:
    from, to, what the checkpoint there is, cause, what is likely behind it, the samples passed over (their places in
    the run's order).
    """
    now, here = run.step, run.source.state()
    restore(run, found)
    begun = run.source.state()
    likely = _blame(run, found, trouble, micros=micros, at=at)
    run.source.seek(begun)
    run.source.pass_over(here)
    return {
        "number": number,
        "from": now,
        "to": found.step,
        "checkpoint": standing(found, trouble),
        "cause": trouble.cause,
        "likely": str(likely),
        "positions": [begun["samples"], here["samples"]],
        "samples": list(trouble.samples),
    }


def _blame(run: Run, found: Found, trouble: Trouble, *, micros: int, at: Mapping[str, int]) -> Likely:
    """Whether the samples are to blame or what the weights had become: the weights of before, which the run has now,
    are asked about the samples that showed the trouble and about those that they learned from last. If they, too, find
    the former far from the latter, it is the samples."""
    known = found.manifest.facts.get("at")
    try:
        before = _loss(run, known, micros) if known else trouble.usual
        harder = _loss(run, at, micros) / before
    except InputError:  # not one label
        return Likely.RATE
    return Likely.DATA if harder > max(math.sqrt(trouble.loss / trouble.usual), FAR) else Likely.RATE


def _loss(run: Run, at: Mapping[str, int], micros: int) -> float:
    """The loss of the global batch at a position, by the weights of now."""
    run.source.seek(at)
    try:
        with run.memory.policy():
            return evaluate(
                lambda batch: run.compute.forward(batch),
                (run.memory.fetch(batch) for batch in run.source.take(micros)),
                run.objective,
                run.compute.total,
                model=run.compute.model,
                frozen=run.frozen,
            ).loss
    finally:
        run.compute.release()
