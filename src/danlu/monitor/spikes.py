"""Spikes of the loss and the gradient norm: which updates are not made, and when the weights themselves are hurt.

Limits are agreed before an update, from the updates before it. An update above them is not made; since the weights then
stay as they are, a batch that is usual again shows that the samples were to blame. Several spikes close together show
that the weights, or the data from here on, are: the run goes back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from danlu.core.config import setting
from danlu.core.report import Limits
from danlu.monitor.causes import Finding, Likely
from danlu.monitor.reading import Reading
from danlu.monitor.usual import Usual

SHOWN = 64  # ids of samples that a trouble remembers


@dataclass(frozen=True, kw_only=True)
class Spikes:
    """What is done about losses and gradients far above the usual."""

    window: int = setting(64, "updates whose median and spread say what is usual", at_least=32)
    loss_ratio: float = setting(3.0, "times its median that a loss must be to be a spike", above=1)
    norm_ratio: float = setting(20.0, "times its median that a gradient norm must be to be a spike", above=1)
    deviations: float = setting(10.0, "and robust standard deviations above it (on a log scale)", above=0)
    in_a_row: int = setting(3, "spikes among twice as many updates after which the run goes back", at_least=1)
    rise: float = setting(1.5, "times its lowest level that the loss must rise to, to count as diverging", above=1)
    max_rollbacks: int = setting(2, "times that a run may go back by itself; then it stops", at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Why a run must go back.

    kind     spikes, or rise (the loss diverges slowly)
    step     when it was seen; ``before``: the last update whose weights are held to be good (0: none)
    loss     of that step; ``usual``: what it was before
    samples  ids of the updates that showed it (the first of them)
    """

    kind: str
    step: int
    before: int
    cause: str
    loss: float
    usual: float
    samples: tuple[str, ...]

    def state(self) -> dict[str, Any]:
        """All of it, as JSON."""
        return asdict(self)

    @staticmethod
    def of(state: Mapping[str, Any]) -> Trouble:
        """The trouble whose state it is."""
        return Trouble(**{**state, "samples": tuple(state["samples"])})


class Spotter:
    """Sees each update, and says by ``limits`` what the next one must hold to be made."""

    def __init__(self, settings: Spikes) -> None:
        self.settings = settings
        self._usual = {
            name: Usual(window=settings.window, ratio=ratio, deviations=settings.deviations)
            for name, ratio in (("loss", settings.loss_ratio), ("gradient norm", settings.norm_ratio))
        }
        self._last: deque[int] = deque(maxlen=2 * settings.in_a_row)  # the last updates: a spike's step, or 0
        self._samples: list[str] = []  # of the spikes among them

    @property
    def limits(self) -> Limits:
        """What the next update must hold."""
        return Limits(loss=self._usual["loss"].limit, norm=self._usual["gradient norm"].limit)

    @property
    def spiking(self) -> bool:
        """Whether any of the last updates was a spike."""
        return any(self._last)

    def see(self, reading: Reading) -> tuple[list[Finding], Trouble | None]:
        """What there is to tell of an update, and the trouble that the run is in."""
        if not reading.finite:
            return [], None
        values = {"loss": reading.loss, "gradient norm": reading.norm}
        if reading.report.sound:
            for name, value in values.items():
                self._usual[name].add(value)
            over = self._over()
            self._last.append(0)
            return over, None
        above = [
            f"its {name} was {value:.4g}, {value / usual.median:.3g} times the usual {usual.median:.3g} "
            f"(the limit was {usual.limit:.3g})"
            for (name, value), usual in zip(values.items(), self._usual.values())
            if value > usual.limit
        ] or ["a number was above its limit"]
        cause = f"Step {reading.step} was skipped: {' and '.join(above)}."
        self._last.append(reading.step)
        self._samples = [*self._samples, *reading.report.samples][:SHOWN]
        spikes = [step for step in self._last if step]
        if len(spikes) < self.settings.in_a_row:
            return [Finding("skipped", cause)], None
        usual = self._usual["loss"].median
        trouble = Trouble(
            kind="spikes",
            step=reading.step,
            before=max(0, spikes[0] - 2),  # the update before the first spike may be what did it
            cause=f"{len(spikes)} of the updates {spikes[0]} to {reading.step} were spikes: at the last, "
            f"{' and '.join(above)}.",
            loss=reading.loss,
            usual=usual,
            samples=tuple(self._samples),
        )
        return [Finding("skipped", cause)], trouble

    def forget(self) -> None:
        """What was usual is so no more: limits begin anew."""
        for usual in self._usual.values():
            usual.restore(())
        self._last.clear()
        self._samples = []

    def state(self) -> dict[str, Any]:
        """Enough to go on as if never interrupted."""
        usual = {name: each.state() for name, each in self._usual.items()}
        return {"usual": usual, "last": list(self._last), "samples": self._samples}

    def restore(self, state: Mapping[str, Any]) -> None:
        """All is as it was."""
        self.forget()
        for name, each in self._usual.items():
            each.restore(state["usual"][name])
        self._last.extend(state["last"])
        self._samples = list(state["samples"])

    def _over(self) -> list[Finding]:
        """Told once an update is usual again after a spike: the weights are the same, so the samples were to blame."""
        if not self._last or not (step := self._last[-1]):
            return []
        self._samples = self._samples if any(list(self._last)[:-1]) else []
        return [
            Finding(
                "spike_over",
                f"The update after step {step}, which was skipped, is usual again with the same weights: the samples "
                f"of step {step} are unlike the rest.",
                Likely.DATA,
            )
        ]
