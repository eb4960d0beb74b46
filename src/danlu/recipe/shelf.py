"""The recipes that come with danlu, and finding one."""

from __future__ import annotations

import difflib
from pathlib import Path

from danlu.core.errors import InputError

SHIPPED = Path(__file__).parent / "shipped"


def shipped() -> dict[str, Path]:
    """Each shipped recipe by its name, in the order of the names."""
    return {file.stem: file for file in sorted(SHIPPED.glob("*.yaml"))}


def caption(file: Path) -> str:
    """What a recipe says of itself: its first line of comment."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            return line.lstrip("# ").strip()
    return ""


def find(name_or_path: str) -> Path:
    """The file of a recipe: a path, a run folder's recipe, or a shipped one by its name."""
    path = Path(name_or_path).expanduser()
    if path.is_dir() and (path / "recipe.yaml").is_file():
        return path / "recipe.yaml"
    if path.is_file():
        return path
    known = shipped()
    if name_or_path in known:
        return known[name_or_path]
    if path.is_dir():
        raise InputError(f"{path} is a folder without recipe.yaml; give a recipe's file, or a name: {', '.join(known)}")
    near = difflib.get_close_matches(name_or_path, known, 1, 0.6)
    did = f"did you mean {near[0]}? Otherwise give" if near else "give"
    raise InputError(
        f"no recipe {name_or_path}: no such file, nor a shipped recipe; {did} a path, or {' | '.join(known)}"
    )
