"""Whether the run is well: numbers that are not finite, steps without labels, weights that nothing moves, spikes,
a loss that diverges or stands still, layers whose gradients explode or vanish."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from danlu.core.contracts import Signal
from danlu.core.report import Limits
from danlu.monitor.causes import Finding, Likely, remedy
from danlu.monitor.layers import Strata
from danlu.monitor.reading import Reading
from danlu.monitor.spikes import Spotter, Trouble
from danlu.monitor.trend import Trend

COUNTS = ("unsound", "unsound_in_all", "unlabelled", "still", "resting")


class Health:
    """Looks at each report. Its answer is the same on every rank, for it only reads what all ranks agree on.

    max_unsound      updates in a row that may be skipped before the run stops
    max_unlabelled   updates in a row that may hold no label before the run stops
    spotter, trend, strata   what looks after spikes, the course of the loss, and layers; None: nothing does
    """

    def __init__(
        self,
        *,
        max_unsound: int,
        max_unlabelled: int,
        total_steps: int,
        still_after: int = 10,
        spotter: Spotter | None = None,
        trend: Trend | None = None,
        strata: Strata | None = None,
    ):
        self.max_unsound = max_unsound
        self.max_unlabelled = max(1, min(max_unlabelled, total_steps))
        self.still_after = still_after
        self.spotter, self.trend, self.strata = spotter, trend, strata
        self.unsound = 0  # in a row, not finite
        self.unsound_in_all = 0
        self.unlabelled = 0  # in a row
        self.still = 0  # in a row, updates whose gradient was exactly zero
        self.resting = 0  # in a row, updates at a rate of zero
        self.cause: str | None = None  # why it answered STOP
        self.likely: Likely | None = None  # what is behind it
        self.trouble: Trouble | None = None  # why it answered ROLLBACK

    @property
    def limits(self) -> Limits:
        """What the next update must hold to be made."""
        return Limits() if self.spotter is None else self.spotter.limits

    def look(self, reading: Reading, *, last_checkpoint: str | None = None) -> tuple[Signal, list[Finding]]:
        """STOP, ROLLBACK or GO, and what there is to tell of this step."""
        findings: list[Finding] = []
        self._soundness(reading, findings, last_checkpoint)
        self._labels(reading, findings)
        self._movement(reading, findings)
        if self.strata is not None:
            findings += self.strata.see(reading.step, reading.report.extra)
        if self.spotter is not None:
            told, trouble = self.spotter.see(reading)
            findings += told
            if trouble is not None and self.trend is not None and self.trend.worn:
                trouble = replace(trouble, before=min(trouble.before, self.trend.lowest_step))
            self.trouble = self.trouble or trouble
        if self.trend is not None:
            told, trouble = self.trend.see(reading, self.strata.dead if self.strata else ())
            findings += told
            self.trouble = self.trouble or (trouble if self.spotter else None)
        if self.cause is not None:
            return Signal.STOP, findings
        return (Signal.GO if self.trouble is None else Signal.ROLLBACK), findings

    def bear(self, *, new: bool) -> None:
        """The trouble is borne: what is a spike is learned anew; and where the loss has a new level, that, too."""
        self.trouble = None
        if self.spotter is not None:
            self.spotter.forget()
        if new and self.trend is not None:
            self.trend.forget()

    def state(self) -> dict[str, Any]:
        """Enough to judge on as if never interrupted, as JSON; the same on every rank."""
        parts = {name: part.state() for name, part in self._parts().items()}
        trouble = None if self.trouble is None else self.trouble.state()
        return {**parts, "trouble": trouble, "counts": [getattr(self, name) for name in COUNTS]}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """All is as it was; without a state, as at a run's start."""
        self.bear(new=True)
        if state is None:
            return
        for name, part in self._parts().items():
            if name in state:
                part.restore(state[name])
        for name, count in zip(COUNTS, state["counts"]):
            setattr(self, name, count)
        if state["trouble"] is not None and self.spotter is not None:
            self.trouble = Trouble.of(state["trouble"])

    def _parts(self) -> dict[str, Spotter | Trend | Strata]:
        parts = {"spikes": self.spotter, "trend": self.trend, "layers": self.strata}
        return {name: part for name, part in parts.items() if part is not None}

    def _soundness(self, reading: Reading, findings: list[Finding], last_checkpoint: str | None) -> None:
        if reading.finite:
            self.unsound = 0
            return
        self.unsound_in_all += 1
        scale = reading.report.extra.get("loss_scale", 0.0)
        if scale > 1 and math.isfinite(reading.loss):  # how fp16 finds its scale: nobody's fault, while it can fall
            cause = f"Step {reading.step} was skipped: fp16 overflowed at a loss scale of {scale:g}, which is halved."
            findings.append(Finding("overflow", cause))
            return
        self.unsound += 1
        scaled = Likely.OVERFLOW if "loss_scale" in reading.report.extra else None
        findings.append(Finding("skipped", f"Step {reading.step} was skipped: {what_is_not_finite(reading)}.", scaled))
        if self.unsound >= self.max_unsound:
            kept = f"; the last good checkpoint is {last_checkpoint}" if last_checkpoint else ""
            self._stop(
                f"Stopped at step {reading.step}: {self.unsound} updates in a row were skipped, the last because "
                f"{what_is_not_finite(reading)} (monitor.max_unsound_steps is {self.max_unsound}){kept}.",
                self._why_not_finite(reading),
            )

    def _why_not_finite(self, reading: Reading) -> Likely:
        if "loss_scale" in reading.report.extra:
            return Likely.OVERFLOW
        if (self.trend and self.trend.rising) or (self.spotter and self.spotter.spiking):
            return Likely.RATE
        return Likely.UNKNOWN

    def _labels(self, reading: Reading, findings: list[Finding]) -> None:
        if not reading.finite or not reading.weights or sum(reading.weights.values()) > 0:
            self.unlabelled = 0
            return
        self.unlabelled += 1
        if self.unlabelled == 1:
            findings.append(Finding("unlabelled", f"Step {reading.step} holds no label: nothing was learned from it."))
        if self.unlabelled >= self.max_unlabelled:
            self._stop(
                f"Stopped at step {reading.step}: {self.unlabelled} updates in a row held no label, so nothing "
                "is learned.",
                Likely.LABELS,
            )

    def _movement(self, reading: Reading, findings: list[Finding]) -> None:
        # Exactly zero, not small: a real gradient never is.
        labelled = reading.report.sound and not self.unlabelled
        self.still = self.still + 1 if labelled and reading.norm == 0.0 else 0
        self.resting = self.resting + 1 if labelled and reading.report.learning_rate == 0.0 else 0
        if self.still == self.still_after:
            text = (
                f"The gradient was exactly zero for {self.still} updates, to step {reading.step}: the loss cannot move."
            )
            findings.append(Finding("still", text, Likely.FROZEN))
        elif self.resting == self.still_after:
            text = (
                f"The learning rate was zero for {self.resting} updates, to step {reading.step}: the loss cannot move."
            )
            findings.append(Finding("still", text, Likely.FROZEN))

    def _stop(self, cause: str, likely: Likely) -> None:
        self.cause, self.likely = f"{cause} {remedy(likely)}", likely


def what_is_not_finite(reading: Reading) -> str:
    """Which number of an unsound step was not finite, in words."""
    bad = [f"loss {n} was {_word(v)}" for n, v in sorted(reading.losses.items()) if not math.isfinite(v)]
    if not math.isfinite(reading.norm):
        bad.append(f"the gradient norm was {_word(reading.norm)}")
    return ", ".join(bad) or "a number was not finite on some rank"


def _word(value: float) -> str:
    return "not a number" if math.isnan(value) else "infinite"
