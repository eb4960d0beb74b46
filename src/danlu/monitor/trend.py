"""Where the loss is going: falling, rising for good, swinging, or standing still.

Losses are taken together in blocks; the median of a block is its level. Only levels are compared, and only differences
beyond the noise within the blocks count, so that single updates alarm nobody.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from danlu.monitor.causes import Finding, Likely
from danlu.monitor.reading import Reading
from danlu.monitor.spikes import Trouble
from danlu.monitor.usual import median, noise

BLOCK = 16  # updates
RECENT = 64  # updates that the noise is taken from
CERTAIN = 2.5  # times the noise of single updates that a level must have moved
FEW = 0.01  # share of the weights that are too few to train
GAIN = 0.002  # share of the loss that is no gain worth the name
WORN, LAST = 1.25, 5  # times the lowest level, of so many last updates
SWING = 4.0  # times as much noise as when it was calmest


class Trend:
    """Sees the loss of each update that was made.

    rise      times the lowest level at which the loss diverges
    plateau   updates without a gain after which a run is said to stand still
    trained   share of the weights that are trained, 0 to 1
    peak      the highest learning rate of the run
    """

    def __init__(self, *, rise: float, plateau: int, trained: float = 1.0, peak: float = math.inf) -> None:
        self.rise, self.plateau, self.trained, self.peak = rise, plateau, trained, peak
        self._forget()

    def _forget(self) -> None:
        self._block: list[float] = []
        self._recent: deque[float] = deque(maxlen=RECENT)
        self.first = self.lowest = self.gained = self.calmest = math.inf
        self.lowest_step = self.gained_step = 0
        self._risen = 0  # blocks in a row
        self._said: set[str] = set()

    @property
    def rising(self) -> bool:
        """Whether it was found to rise or to swing."""
        return not self._said.isdisjoint(("rising", "swinging"))

    @property
    def worn(self) -> bool:
        """Whether the last losses are above the lowest level: what ails the run began before it was seen."""
        last = list(self._recent)[-LAST:]
        return len(last) == LAST and median(last) > WORN * self.lowest

    def see(self, reading: Reading, dead: tuple[str, ...] = ()) -> tuple[list[Finding], Trouble | None]:
        """What there is to tell of the course so far, and the trouble that the run is in. ``dead``: layers without a
        gradient."""
        if not reading.report.sound or not reading.loss > 0:
            return [], None
        findings: list[Finding] = []
        if self.first == math.inf:
            self.first = self.lowest = self.gained = reading.loss
            if self.trained < FEW:
                self._say(findings, "frozen", f"Only {self.trained:.2%} of the weights are trained.", Likely.FROZEN)
        self._block.append(reading.loss)
        self._recent.append(reading.loss)
        if len(self._block) < BLOCK:
            return findings, None
        level, self._block = median(self._block), []
        return self._judge(level, reading, dead)

    def _judge(self, level: float, reading: Reading, dead: tuple[str, ...]) -> tuple[list[Finding], Trouble | None]:
        step, swing = reading.step, noise(list(self._recent))
        relative = noise([math.log(loss) for loss in self._recent])
        risen = math.log(level / self.lowest)
        findings: list[Finding] = []
        trouble = None
        self._risen = self._risen + 1 if risen > max(math.log(self.rise), CERTAIN * relative) else 0
        if self._risen >= 2:
            trouble = self._diverging(level, reading)
        elif risen > max(math.log(self.rise) / 2, CERTAIN * relative):
            self._say(findings, "rising", f"{self._compared(level, step)}: it may be diverging.", Likely.RATE)
        if swing > SWING * self.calmest > 0 and swing > 0.05 * level and risen > 0:
            text = f"The loss swings by {swing:.3g} from update to update, {swing / self.calmest:.3g} times as much as"
            self._say(
                findings, "swinging", f"{text} when it was calmest, and does not fall, to step {step}.", Likely.RATE
            )
        if level < self.gained * (1 - GAIN):
            self.gained, self.gained_step = level, step
            self._said.discard("plateau")
        elif step - self.gained_step >= self.plateau and reading.report.learning_rate >= 0.1 * self.peak:
            likely = self._standing(level, reading, dead)
            text = (
                f"The loss has not fallen since step {self.gained_step or 1}, to step {step}: it stands at {level:.4g}."
            )
            self._say(findings, "plateau", text, likely)
        if level < self.lowest:
            self.lowest, self.lowest_step = level, step
        if len(self._recent) >= 2 * BLOCK:
            self.calmest = min(self.calmest, swing)
        return findings, trouble

    def _diverging(self, level: float, reading: Reading) -> Trouble:
        return Trouble(
            kind="rise",
            step=reading.step,
            before=self.lowest_step,
            cause=f"{self._compared(level, reading.step)}: it diverges.",
            loss=level,
            usual=self.lowest,
            samples=reading.report.samples,
        )

    def _compared(self, level: float, step: int) -> str:
        when = f"at step {self.lowest_step}" if self.lowest_step else "before the first update"
        return (
            f"The loss is at {level:.4g} at step {step}, {level / self.lowest:.3g} times the {self.lowest:.4g} {when}"
        )

    def _standing(self, level: float, reading: Reading, dead: tuple[str, ...]) -> Likely:
        if reading.norm == 0 or reading.report.learning_rate == 0 or self.trained < 0.5:
            return Likely.FROZEN
        if dead:
            return Likely.LAYER
        if level > self.first * 1.02 or self.rising:
            return Likely.RATE
        return Likely.SLOW

    def _say(self, findings: list[Finding], kind: str, cause: str, likely: Likely) -> None:
        """Once, until it is over."""
        if kind not in self._said:
            self._said.add(kind)
            findings.append(Finding(kind, cause, likely))

    def forget(self) -> None:
        """What was is no measure any more."""
        self._forget()

    def state(self) -> dict[str, Any]:
        """Enough to go on as if never interrupted."""
        levels = [self.first, self.lowest, self.gained, self.calmest]
        return {
            "block": self._block,
            "recent": list(self._recent),
            "levels": [None if level == math.inf else level for level in levels],
            "steps": [self.lowest_step, self.gained_step, self._risen],
            "said": sorted(self._said),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """All is as it was."""
        self._forget()
        self._block = list(state["block"])
        self._recent.extend(state["recent"])
        levels = [math.inf if level is None else float(level) for level in state["levels"]]
        self.first, self.lowest, self.gained, self.calmest = levels
        self.lowest_step, self.gained_step, self._risen = state["steps"]
        self._said = set(state["said"])
