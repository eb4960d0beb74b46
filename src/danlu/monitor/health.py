"""Whether the run is well: numbers that are not finite, steps without labels, weights that nothing moves."""

from __future__ import annotations

import math
from dataclasses import dataclass

from danlu.core.contracts import Signal
from danlu.monitor.reading import Reading


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to tell: a kind for the log of events, and one sentence."""

    kind: str
    cause: str


class Health:
    """Looks at each report. Its answer is the same on every rank, for it only reads what all ranks agree on.

    max_unsound      updates in a row that may be skipped before the run stops
    max_unlabelled   updates in a row that may hold no label before the run stops
    """

    def __init__(self, *, max_unsound: int, max_unlabelled: int, total_steps: int, still_after: int = 10):
        self.max_unsound = max_unsound
        self.max_unlabelled = max(1, min(max_unlabelled, total_steps))
        self.still_after = still_after
        self.unsound = 0  # in a row
        self.unsound_in_all = 0
        self.unlabelled = 0  # in a row
        self.still = 0  # in a row, updates whose gradient was exactly zero
        self.cause: str | None = None  # why it answered STOP

    def look(self, reading: Reading, *, last_checkpoint: str | None = None) -> tuple[Signal, list[Finding]]:
        """STOP or GO, and what there is to tell of this step."""
        findings: list[Finding] = []
        self._soundness(reading, findings, last_checkpoint)
        self._labels(reading, findings)
        self._movement(reading, findings)
        return (Signal.GO if self.cause is None else Signal.STOP), findings

    def _soundness(self, reading: Reading, findings: list[Finding], last_checkpoint: str | None) -> None:
        if reading.report.sound:
            self.unsound = 0
            return
        self.unsound += 1
        self.unsound_in_all += 1
        findings.append(Finding("skipped", f"Step {reading.step} was skipped: {what_is_not_finite(reading)}."))
        if self.unsound >= self.max_unsound:
            kept = f"; the last good checkpoint is {last_checkpoint}" if last_checkpoint else ""
            self.cause = (
                f"Stopped at step {reading.step}: {self.unsound} updates in a row were skipped, the last because "
                f"{what_is_not_finite(reading)} (monitor.max_unsound_steps is {self.max_unsound}){kept}. "
                "A lower optimizer.learning_rate, a longer warm-up or memory.precision: fp32 usually helps."
            )

    def _labels(self, reading: Reading, findings: list[Finding]) -> None:
        if not reading.report.sound or not reading.weights or sum(reading.weights.values()) > 0:
            self.unlabelled = 0
            return
        self.unlabelled += 1
        if self.unlabelled == 1:
            findings.append(Finding("unlabelled", f"Step {reading.step} holds no label: nothing was learned from it."))
        if self.unlabelled >= self.max_unlabelled:
            self.cause = (
                f"Stopped at step {reading.step}: {self.unlabelled} updates in a row held no label, so nothing "
                "is learned. `danlu check RECIPE` shows a batch: is every token masked out?"
            )

    def _movement(self, reading: Reading, findings: list[Finding]) -> None:
        # Exactly zero, not small: a real gradient never is.
        if not reading.report.sound or self.unlabelled or reading.norm != 0.0:
            self.still = 0
            return
        self.still += 1
        if self.still == self.still_after:
            findings.append(
                Finding(
                    "still",
                    f"The gradient was exactly zero for {self.still} updates, to step {reading.step}: the loss "
                    "cannot move. Is every weight frozen, or the loss constant?",
                )
            )


def what_is_not_finite(reading: Reading) -> str:
    """Which number of an unsound step was not finite, in words."""
    bad = [f"loss {n} was {_word(v)}" for n, v in sorted(reading.losses.items()) if not math.isfinite(v)]
    if not math.isfinite(reading.norm):
        bad.append(f"the gradient norm was {_word(reading.norm)}")
    return ", ".join(bad) or "a number was not finite on some rank"


def _word(value: float) -> str:
    return "not a number" if math.isnan(value) else "infinite"
