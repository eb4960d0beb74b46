"""A run's checkpoint becomes the start of another run beside it, with named changes. The old run stays as it is."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from danlu.checkpoint.folder import whole
from danlu.checkpoint.lock import Lock
from danlu.checkpoint.manifest import Damaged, Manifest, step_name, verify
from danlu.core.config import plain
from danlu.core.errors import InputError
from danlu.core.paths import RunFolder, shown, write_whole
from danlu.monitor import jsonl
from danlu.recipe.recipe import Difference, Recipe, branches
from danlu.recipe.yaml import load, save

SIZES = ("batch.global_batch_size", "batch.global_batch_tokens", "batch.ramp")


def branch(root: Path, *, to: int, overrides: list[str], announce: Callable[[str], None]) -> Path:
    """The recipe of a new run that stands at a step of another one; gives its file.

    Its folder lies beside the old one's, under a name of its own (``name=…`` gives it another), and holds what the old
    run was up to there: the checkpoint, by hard links where the file system has them, and the lines of metrics.jsonl.
    Raises InputError, and nothing is made, where the step is not kept, its checkpoint is damaged, or a change cannot
    be made.
    """
    folder = RunFolder(root)
    if not folder.recipe.is_file():
        raise InputError(f"{root} is no run's folder: it holds no recipe.yaml")
    manifest = _kept(folder, to)
    old = load(str(folder.recipe))
    new, changes = _changed(folder, old, overrides, to)
    place = RunFolder(Path(new.folder) / new.name)
    if place.root.exists():
        raise InputError(f"{place.root} is there already; give the new run another name with name=…")
    for path, before, after in changes:
        announce(f"{path}: was {before}, is {after} from here on")
    with _built(place.root) as part:
        _copy(folder.checkpoints / step_name(to), RunFolder(part).checkpoints / step_name(to))
        write_whole(RunFolder(part).metrics, _lines(folder.metrics, to))
        facts = {"run": str(folder.root.absolute()), "changes": {path: [a, b] for path, a, b in plain(changes)}}
        write_whole(RunFolder(part).events, _event("branched", to, facts))
        save(new, RunFolder(part).recipe)
    _tell_old(folder, to, {"run": str(place.root)})
    announce(f"{shown(place.root)}: begun at step {manifest.step} of {shown(folder.root)}, which stays as it is")
    return place.recipe


def _kept(folder: RunFolder, to: int) -> Manifest:
    """The manifest of the checkpoint of that step, every byte of it looked at."""
    kept = whole(folder.checkpoints) if folder.checkpoints.is_dir() else {}
    if to not in kept:
        held = ", ".join(_named(step, kept[step]) for step in sorted(kept)) or "none"
        raise InputError(
            f"{shown(folder.root)}: no checkpoint of step {to} is kept; these are: {held} "
            "(checkpoint.keep_last and keep_best say how many)"
        )
    try:
        problems = verify(folder.checkpoints / step_name(to))
    except Damaged as damage:
        problems = [str(damage)]
    if problems:
        others = ", ".join(str(step) for step in sorted(kept) if step != to)
        raise InputError(f"{step_name(to)} is damaged: {problems[0]}" + (f"; others kept: {others}" if others else ""))
    return kept[to]


def _named(step: int, manifest: Manifest) -> str:
    return f"{step}" if manifest.metric is None else f"{step} (evaluation loss {manifest.metric:.4g})"


def _changed(folder: RunFolder, old: Recipe, overrides: list[str], to: int) -> tuple[Recipe, list[Difference]]:
    """The new run's recipe, and what it changes of the old one's but for its name."""
    given = {word.partition("=")[0] for word in overrides}
    try:
        new = _loaded(folder, overrides, given)
    except InputError as mistakes:
        alone = _refused_alone(folder, old, overrides)
        raise InputError("\n".join([str(mistakes), *([_sentence(alone, to)] if alone else [])])) from None
    if "folder" not in given:
        new = replace(new, folder=str(folder.root.absolute().parent))  # the old one may have been moved
    if "name" not in given:
        new = replace(new, name=_free(Path(new.folder), f"{folder.root.name}-from-{to}"))
    allowed, refused = branches(old, new)
    if refused:
        raise InputError(_sentence(refused, to))
    if new.max_steps is not None and new.max_steps < to:
        raise InputError(f"max_steps is {new.max_steps}, but the run stands at step {to} already")
    return new, [each for each in allowed if each[0] not in ("name", "folder")]


def _loaded(folder: RunFolder, overrides: list[str], given: set[str]) -> Recipe:
    """The old run's recipe with the changes. A micro-batch that fitted the old batch and not the new one is chosen
    anew, for it may be that nobody ever asked for it."""
    try:
        return load(str(folder.recipe), overrides)
    except InputError:
        if given.isdisjoint(SIZES) or "batch.micro_batch_size" in given:
            raise
    return load(str(folder.recipe), [*overrides, "batch.micro_batch_size=auto"])


def _refused_alone(folder: RunFolder, old: Recipe, overrides: list[str]) -> list[tuple[str, str]]:
    """Which of the changes, each by itself, a run gone back cannot make: told with the mistakes, all at once."""
    refused: dict[str, str] = {}
    for word in overrides:
        path, _, value = word.partition("=")
        # Another kind has other fields than those in the file: then it is the kind alone.
        section, _, field = path.rpartition(".")
        for typed in (word, f"{section}={{kind: {value}}}") if section and field == "kind" else (word,):
            with contextlib.suppress(InputError):
                refused.update(branches(old, load(str(folder.recipe), [typed]))[1])
                break
    return list(refused.items())


def _sentence(refused: list[tuple[str, str]], to: int) -> str:
    listed = "\n".join(f"  {path} {why}" for path, why in refused)
    return f"a run gone back to step {to} cannot change this:\n{listed}"


def _free(parent: Path, name: str) -> str:
    """The name, or the same with the first number that is free."""
    names = (name + more for more in ("", *(f"-{number}" for number in range(2, 1000))))
    return next(each for each in names if not (parent / each).exists())


@contextlib.contextmanager
def _built(root: Path) -> Iterator[Path]:
    """A folder that is filled inside, and has its name only once it is whole."""
    part = root.with_name(f".{root.name}.{os.getpid()}.part")
    try:
        part.mkdir(parents=True)
        yield part
        part.rename(root)
    except OSError as error:
        raise InputError(f"{root}: the new run cannot be kept there ({error.strerror}: {error.filename})") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _copy(there: Path, here: Path) -> None:
    """The same files stand in both folders: linked, or copied where the system cannot link."""
    here.mkdir(parents=True)
    for file in sorted(there.iterdir()):
        try:
            os.link(file, here / file.name)
        except OSError:
            shutil.copyfile(file, here / file.name)


def _lines(metrics: Path, to: int) -> bytes:
    """The lines of metrics.jsonl up to a step."""
    content = metrics.read_bytes() if metrics.exists() else b""
    return content[: len(content) - len(jsonl.after(metrics, to))] if content else b""


def _event(name: str, step: int, facts: dict[str, Any]) -> bytes:
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return json.dumps({"event": name, "step": step, "time": now, **facts}, ensure_ascii=False).encode() + b"\n"


def _tell_old(folder: RunFolder, to: int, facts: dict[str, Any]) -> None:
    """The old run's events say where it was branched; not while it is at work, or where it may not be written."""
    with contextlib.suppress(InputError, OSError), Lock(folder.lock):
        jsonl.mend(folder.events)
        with open(folder.events, "ab") as events:
            events.write(_event("branch", to, facts))
