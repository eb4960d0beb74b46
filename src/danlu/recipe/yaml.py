"""Recipes are found by name or path, read, completed and saved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from danlu.core import config
from danlu.core.paths import write_whole
from danlu.core.schema import Rules
from danlu.recipe.names import NAMES
from danlu.recipe.planned import PLANNED
from danlu.recipe.recipe import CHECKS, Recipe
from danlu.recipe.shelf import SHIPPED, find

NO_WORDS: frozenset[str] = frozenset()
PATHS = {
    "folder": NO_WORDS,
    "memory.offload_folder": NO_WORDS,
    "model.from": NO_WORDS,
    "data.tokenizer": frozenset({"byte"}),
    "data.train.*": NO_WORDS,
    "data.train.*.path": NO_WORDS,
    "data.validation.*": NO_WORDS,
}
RULES = Rules(names=NAMES, planned=PLANNED, paths=PATHS, places={"shipped": SHIPPED}, checks=CHECKS)
HEADING = "# A danlu recipe, resolved and complete: `danlu train` with this file repeats the run.\n"


def load(name_or_path: str, overrides: Iterable[str] = ()) -> Recipe:
    """The recipe of that name, or in that file (or run folder), with ``key.sub=value`` put in place.

    Every path in it is absolute: what the file says resolves against the file, what was typed against the working
    folder, and `folder`, where nothing was said, too. Raises InputError with every mistake in one message.
    """
    file = find(name_or_path)
    return _settled(config.load(Recipe, config.read_text(file), file=file, overrides=overrides, rules=RULES))


def complete(recipe: Recipe) -> Recipe:
    """A recipe made in Python, held to what a file is held to; relative paths resolve against the working folder."""
    return _settled(config.checked(recipe, rules=RULES, name="the recipe"))


def save(recipe: Recipe, file: Path) -> None:
    """The file holds the whole recipe, every field; `load` gives an equal one back."""
    write_whole(file, (HEADING + config.dump(recipe)).encode())


def _settled(recipe: Recipe) -> Recipe:
    return replace(recipe, folder=str(Path(recipe.folder).absolute()))
