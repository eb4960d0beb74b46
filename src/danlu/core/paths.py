"""What a run folder holds, and writing a file whole or not at all."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of one run. Their names are a contract: other people's scripts lean on them."""

    root: Path

    def __fspath__(self) -> str:
        return str(self.root)

    def __str__(self) -> str:
        return str(self.root)

    @property
    def recipe(self) -> Path:
        return self.root / "recipe.yaml"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def environment(self) -> Path:
        return self.root / "environment.json"

    @property
    def trainer_state(self) -> Path:
        return self.root / "trainer_state.json"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def curve(self) -> Path:
        return self.root / "loss.png"

    @property
    def profile(self) -> Path:
        return self.root / "profile"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def aside(self) -> Path:
        """Lines of metrics.jsonl that the run went back behind."""
        return self.root / "rolled-back"

    @property
    def lock(self) -> Path:
        return self.root / ".lock"


def shown(path: Path) -> Path:
    """The path as a person would type it here: relative to the working folder where it lies in it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def write_whole(path: Path, content: bytes) -> None:
    """The file holds exactly this content, durably; a crash leaves the old one or the new one, never a part."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    make_durable(path.parent)


def make_durable(path: Path) -> None:
    """What was written to a file, or the names made, renamed or removed in a folder, outlive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
