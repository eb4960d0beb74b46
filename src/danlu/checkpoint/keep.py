"""The settings of checkpoints, and which of them stay."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from danlu.core.config import setting
from danlu.core.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When a run is saved, and how many of its checkpoints are kept."""

    save_steps: int = setting(100, "save after every so many updates", at_least=1)
    keep_last: int = setting(2, "how many of the newest to keep; -1 keeps all", at_least=-1)
    keep_best: int = setting(1, "how many of those with the lowest evaluation loss to keep besides", at_least=0)
    asynchronous: bool = setting(True, "write in the background while training goes on")
    publish: Literal["final", "best", "average"] = setting(
        "final", "which weights the run's model folder holds at the end; average: the moving one of optimizer.average"
    )

    def __post_init__(self) -> None:
        if self.keep_last == 0 or self.keep_last < -1:
            raise InputError(
                f"keep_last: {self.keep_last} would keep nothing to go on from; give 1 or more, or -1 to keep all"
            )

    @property
    def kept(self) -> int | None:
        """How many stay at most; None for all."""
        return None if self.keep_last == -1 else self.keep_last + self.keep_best


def doomed(
    metrics: Mapping[int, float | None], newest: int, settings: Checkpoint, *, extra: Collection[int] = ()
) -> list[int]:
    """The steps that need not stay once ``newest`` is safe, oldest first.

    ``metrics`` gives the evaluation loss of each whole checkpoint (None where it was not measured). What lies after
    ``newest`` (a run gone back to an earlier step) is not counted and not touched: it is replaced when its step comes.
    Of equal losses the newer counts as the better.

    ``extra``: steps that were saved only because the run left there. They push out none of the others, so that a run
    that was interrupted holds what one that was not does; such a one itself stays until a newer one is safe.
    """
    if settings.keep_last == -1:
        return []
    steps = sorted(step for step in metrics if step <= newest)
    due = [step for step in steps if step not in extra]
    measured = [(metric, -step) for step in due if (metric := metrics[step]) is not None]
    best = {-negative for _, negative in sorted(measured)[: settings.keep_best]}
    stay = {newest, *due[-settings.keep_last :], *best}
    return [step for step in steps if step not in stay]


def room_needed(size: int, settings: Checkpoint) -> int | None:
    """Bytes on disk that such checkpoints take at most: those kept, one that an interrupted run left with, and the one
    being written; None: no bound."""
    return None if settings.kept is None else size * (settings.kept + 2)
