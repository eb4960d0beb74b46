"""`danlu train RECIPE key=value …`: a model trains, on this process or on several."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from danlu.recipe.recipe import Recipe


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The verb and its options are known to the parser."""
    parser = subparsers.add_parser(
        "train",
        help="train a model by a recipe",
        description="Train a model by a recipe: a shipped name (danlu recipes) or a YAML file. The same command on the "
        "same run folder goes on where it stopped.",
    )
    parser.add_argument("recipe", help="a shipped recipe's name, or a path")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="fields of the recipe, e.g. max_steps=100")
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="processes on this machine (default 1)")
    parser.add_argument("--restart", action="store_true", help="move an existing run folder aside and begin anew")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The run is over, one way or the other: its exit code."""
    from danlu.core.errors import InputError
    from danlu.train.signals import listening

    if arguments.nproc < 1:
        raise InputError(f"--nproc {arguments.nproc}: at least one process is needed")
    with listening(owner=True) as told:  # before all that takes long to import
        from danlu.core import world
        from danlu.recipe.yaml import load

        recipe = load(arguments.recipe, arguments.overrides)
        if arguments.nproc > 1 and world.here().size == 1:
            return _spawn(arguments, recipe)
        from danlu.train.loop import train

        folder = train(recipe, restart=arguments.restart, told=told)
        if world.here().first:
            print(_next(folder.root))
        return 0


def _next(folder: Path) -> str:
    """What to try with a finished run."""
    from danlu.core.paths import shown as as_typed

    shown = as_typed(folder)
    return (
        f"Next: danlu generate {shown} --prompt 'Once upon a time' goes on with any text; {shown}/loss.png is the "
        "curve; danlu recipes shakespeare > mine.yaml is a recipe to start your own from."
    )


def _spawn(arguments: argparse.Namespace, recipe: Recipe) -> int:
    """Starts the ranks with torchrun's own launcher, after everything that needs no rank has been checked."""
    from danlu.launch import local
    from danlu.train.assemble import refuse

    refuse(recipe, ranks=arguments.nproc)
    words = ["train", arguments.recipe, *arguments.overrides]
    words += ["--restart"] * arguments.restart + ["--debug"] * arguments.debug
    return local.start(words, count=arguments.nproc)
