"""The checkpoints that a folder holds: those that are whole, those that go, what was left half-done."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from danlu.checkpoint.disk import Disk
from danlu.checkpoint.keep import Checkpoint, doomed
from danlu.checkpoint.manifest import Damaged, Manifest, aside_name, read_manifest, step_name, step_of, verify
from danlu.core.log import logger


def prune(disk: Disk, root: Path, newest: int, settings: Checkpoint) -> tuple[str, ...]:
    """What the settings do not keep is gone; never fails a save that stands. Gives the names removed."""
    try:
        disk.remove(root / aside_name(newest))
        found = whole(root)
        metrics = {step: manifest.metric for step, manifest in found.items()}
        if newest not in metrics:
            logger.warning("%s cannot be read back; nothing older is removed", root / step_name(newest))
            return ()
        extra = {step for step, manifest in found.items() if not manifest.due}
        steps = doomed(metrics, newest, settings, extra=extra)
        # When it would be the only one left, it is read back first, every byte.
        if steps and len(steps) == len(metrics) - 1 and (problems := verify(root / step_name(newest))):
            logger.warning("%s: %s; nothing older is removed", root / step_name(newest), problems[0])
            return ()
        for step in steps:
            remove_checkpoint(disk, root, step)
        return tuple(step_name(step) for step in steps)
    except OSError as error:
        logger.warning("older checkpoints in %s could not be removed: %s", root, error.strerror)
        return ()


def remove_checkpoint(disk: Disk, root: Path, step: int) -> None:
    """No checkpoint of that step: it loses its name first, so that a half-removed one is never taken for one."""
    leaving = root / f"del-{step:06d}"
    disk.remove(leaving)
    disk.rename(root / step_name(step), leaving)
    try:
        disk.sync_folder(root)  # or, after a crash, it might have its name again and nothing else
    finally:
        disk.remove(leaving)


def whole(root: Path) -> dict[int, Manifest]:
    """The checkpoints of a folder by step, whose manifests can be read (the shards are not looked at)."""
    found = {}
    for path in root.iterdir():
        step = step_of(path.name)
        if step is not None and path.is_dir():
            with contextlib.suppress(Damaged, OSError):
                manifest = read_manifest(path)
                if manifest.step == step:
                    found[step] = manifest
    return found


def tidy(disk: Disk, folder: Path, attempt: str = "") -> None:
    """Nothing half-done is left: aborted saves and half-removed checkpoints are gone, and a checkpoint that a save had
    moved aside is back in its place unless the new one stands there."""
    good = whole(folder)
    for path in folder.iterdir():
        if path.name.startswith("tmp-") and not (attempt and re.fullmatch(rf"tmp-\d+-{attempt}-\d+", path.name)):
            logger.info("removed %s: a save that was cut off", path.name)
            disk.remove(path)
        elif path.name.startswith("del-"):
            disk.remove(path)
        elif re.fullmatch(r"old-\d{6,18}", path.name):
            step = int(path.name[4:])
            if step not in good:
                with contextlib.suppress(FileNotFoundError):
                    remove_checkpoint(disk, folder, step)
                disk.rename(path, folder / step_name(step))
            else:
                disk.remove(path)
