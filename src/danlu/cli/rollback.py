"""`danlu rollback RUN --to STEP key=value …`: back to a kept checkpoint, and on from there with named changes."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The verb and its options are known to the parser."""
    parser = subparsers.add_parser(
        "rollback",
        help="go back to a checkpoint of a run, and on from there with named changes",
        description="Go back to a kept checkpoint of a run, and on from there with named changes, as a new run beside "
        "the old one, which stays as it is. What may change: the rate, its schedule, clipping and the rest of the "
        "optimizer but for its kind; the batch; the length; the layout; what is saved, measured and shown.",
    )
    parser.add_argument("folder", metavar="RUN", help="the run's folder")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes, e.g. optimizer.learning_rate=3e-4")
    parser.add_argument("--to", type=int, required=True, metavar="STEP", help="the step of a checkpoint that is kept")
    parser.add_argument("--nproc", type=int, metavar="N", help="processes on this machine (default: as the run had)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The new run is over, one way or the other: its exit code."""
    from danlu.cli import train
    from danlu.core import log
    from danlu.core.errors import InputError
    from danlu.core.log import logger
    from danlu.recipe.yaml import load
    from danlu.train.branch import branch

    log.start(rank=0, size=1)
    root = Path(arguments.folder)
    if not (root / "recipe.yaml").is_file():
        raise InputError(f"{root} is no run's folder: it holds no recipe.yaml")
    ranks = load(str(root)).parallel.ranks
    count = ranks if arguments.nproc is None else arguments.nproc
    words = list(arguments.overrides)
    if count != ranks:  # what was settled for as many ranks is settled anew
        words = ["parallel.shard=auto", "batch.micro_batch_size=auto", *words]
    recipe = branch(root, to=arguments.to, overrides=words, announce=logger.info)
    return train.run(
        argparse.Namespace(recipe=str(recipe), overrides=[], nproc=count, restart=False, debug=arguments.debug)
    )
