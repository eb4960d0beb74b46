"""How many rows each update has: the same all along, or growing at the start of a run.

A size is a pure function of the samples that were read before, so the position of a run, one integer, still says
everything: which rows come next, how many of them, and how many updates are to come.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from danlu.core.config import setting
from danlu.core.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """The batch grows from a few rows to the whole, by as many rows again each time, each size for as long.

    The learning rate goes by the update's number alone: a smaller batch is not given a smaller rate. So a ramp does
    not replace warm-up; it stands beside it.
    """

    from_: int = setting(doc="rows of the first updates; it must divide the global batch", at_least=1)
    steps: int | None = setting(None, "updates in which the batch grows", at_least=1, suffixes=True)
    tokens: int | None = setting(
        None, "tokens read while the batch grows, in place of steps", at_least=1, suffixes=True
    )

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.tokens is None):
            raise ValueError("steps: give either steps or tokens, in which the batch grows")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Rows of each update. From sample starts[i] on, an update has rows[i] of them."""

    starts: tuple[int, ...]
    rows: tuple[int, ...]

    def at(self, samples: int) -> int:
        """Rows of the update that comes after so many samples."""
        return self.rows[bisect_right(self.starts, samples) - 1]

    def updates(self, samples: int) -> int:
        """Updates that read at least so many samples, from the beginning."""
        done = 0
        for start, rows, end in zip(self.starts, self.rows, (*self.starts[1:], samples)):
            if start >= samples:
                break
            done += -(-(min(end, samples) - start) // rows)
        return done

    def samples(self, updates: int) -> int:
        """Samples that so many updates read, from the beginning."""
        for start, rows, end in zip(self.starts, self.rows, self.starts[1:]):
            here = (end - start) // rows
            if updates <= here:
                return start + updates * rows
            updates -= here
        return self.starts[-1] + updates * self.rows[-1]

    @property
    def largest(self) -> int:
        """Rows of the largest update."""
        return max(self.rows)


def sizes(rows: int, ramp: Ramp | None = None, *, sequence_length: int = 1) -> Sizes:
    """The sizes of a run with `rows` rows an update, reached by a ramp if there is one.

    A ramp over steps has its full size from update steps + 1 on; one over tokens from the first update that comes after
    so many tokens (in rows of full length). Raises InputError where `from` does not divide the rows.
    """
    if ramp is None:
        return Sizes((0,), (rows,))
    if rows % ramp.from_:
        raise InputError(
            f"batch.ramp.from is {ramp.from_}, which does not divide the {rows} rows of a full update; "
            f"{math.gcd(ramp.from_, rows)} would do"
        )
    levels = rows // ramp.from_
    starts, at, made = [0], 0, 0
    for level in range(1, levels):
        size = level * ramp.from_
        if ramp.steps is not None:
            until = math.ceil(level * ramp.steps / (levels - 1))
            updates, made = until - made, until
        else:
            assert ramp.tokens is not None
            enough = math.ceil(level * ramp.tokens / ((levels - 1) * sequence_length))
            updates = max(0, -(-(enough - at) // size))
        at += updates * size
        starts.append(at)
    return Sizes(tuple(starts), tuple(level * ramp.from_ for level in range(1, levels + 1)))
