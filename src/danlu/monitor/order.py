"""Whether the samples of a run come in an order that training suffers from, seen by their ids."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from danlu.monitor.causes import Finding, Likely
from danlu.monitor.reading import Reading

EVERY = 16  # updates between two looks
LEAST = 8  # samples before an order can be seen
SHARE = 0.5  # of the samples


class Order:
    """Sees the ids of this rank's samples, ``source:epoch:row``. Says each thing once."""

    def __init__(self) -> None:
        self._before: tuple[str, ...] = ()
        self._said: set[str] = set()

    @property
    def found(self) -> bool:
        """Whether anything was."""
        return bool(self._said)

    def see(self, reading: Reading) -> list[Finding]:
        """What there is to tell; nothing where ids have another form."""
        before, self._before = self._before, reading.report.samples
        if reading.step % EVERY or len(self._said) == 2:
            return []
        earlier, now = rows(before), rows(self._before)
        findings: list[Finding] = []
        if len(earlier) + len(now) >= LEAST and in_line(earlier + now) > SHARE:
            text = (
                f"The samples of step {reading.step} stand in their source one after the other: they are not shuffled."
            )
            self._say(findings, "unshuffled", text)
        if now and len(set(now) & set(earlier)) > SHARE * len(set(now)):
            text = f"The samples of step {reading.step} are those of the step before, for the most part."
            self._say(findings, "repeated", text)
        return findings

    def _say(self, findings: list[Finding], kind: str, cause: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            findings.append(Finding(kind, cause, Likely.DATA))


def rows(samples: Sequence[str]) -> list[tuple[str, int]]:
    """Source and row of each id of the form ``source:epoch:row``."""
    parts = [sample.rsplit(":", 2) for sample in samples]
    return [(each[0], int(each[2])) for each in parts if len(each) == 3 and each[2].isdecimal()]


def in_line(found: Sequence[tuple[str, int]]) -> float:
    """The share of rows, 0 to 1, that are the next one of their source after the one before."""
    if len(found) < 2:
        return 0.0
    next_ones = sum(a[0] == b[0] and b[1] == a[1] + 1 for a, b in pairwise(found))
    return next_ones / (len(found) - 1)
