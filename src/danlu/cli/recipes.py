"""`danlu recipes`: the recipes that come with danlu, and every setting that a recipe may hold."""

from __future__ import annotations

import argparse
import shutil
import textwrap


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The verb and its options are known to the parser."""
    parser = subparsers.add_parser(
        "recipes",
        help="list the shipped recipes, show one, or show every setting",
        description="List the recipes that come with danlu; with a name, print that one (start your own from it); with "
        "--fields, print every setting with what it takes, its default and what it does.",
    )
    parser.add_argument("name", nargs="?", help="a shipped recipe, or with --fields a section, like optimizer")
    parser.add_argument("--fields", action="store_true", help="print every setting of a recipe")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """What was asked for stands on standard output."""
    if arguments.fields:
        return _fields(arguments.name or "")
    from danlu.recipe.shelf import caption, find, shipped

    if arguments.name:
        print(find(arguments.name).read_text(encoding="utf-8"), end="")
        return 0
    known = shipped()
    width = max(map(len, known))
    for name, file in known.items():
        print(f"{name:<{width}}  {caption(file)}")
    print("\ndanlu recipes NAME prints one; danlu train NAME key=value … runs it; --fields lists every setting.")
    return 0


def _fields(section: str) -> int:
    from danlu.core.config import describe
    from danlu.core.errors import InputError
    from danlu.recipe.recipe import Recipe

    plain = section.strip(".")
    rows = [row for row in describe(Recipe) if not plain or row.within(plain)]
    if not rows:
        raise InputError(f"no setting {section}; danlu recipes --fields lists all of them")
    columns = shutil.get_terminal_size((120, 24)).columns
    left = max(len(row.path) for row in rows)
    for row in rows:
        takes = [row.takes] if row.takes not in ("a section", "null", row.default) else []
        facts = [*takes, "required" if row.default == "required" else f"default {row.default}"]
        text = f"{row.doc} [{'; '.join(facts)}]"
        lines = textwrap.wrap(text.strip(), max(columns - left - 2, 40))
        print(f"{row.path:<{left}}  {lines[0]}")
        for line in lines[1:]:
            print(f"{'':<{left}}  {line}")
    return 0
