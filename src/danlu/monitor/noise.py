"""The gradient noise scale (McCandlish et al. 2018, arXiv:1812.06162): which size of batch pays, and a word on it.

The mean gradient of b tokens has a squared norm of |G|^2 + tr(S) / b on average, G being the true gradient and S the
covariance of one token's. Two sizes give both unknowns (appendix A.1), and B_simple = tr(S) / |G|^2, in tokens. Far
below it twice the batch needs half the updates; far above it, as many as before.
"""

from __future__ import annotations

from collections.abc import Mapping

from danlu.core.report import Report

SMOOTHING = 0.9  # share of the means that a measurement keeps
LEAST = 10  # measurements before anything is said
STEADY = 3  # measurements in a row that must say so before another verdict is told
ABOVE, BELOW = 2.0, 0.25  # noise scale / batch, beyond which a verdict is clear


class NoiseScale:
    """Both unknowns as moving means, each by itself: the ratio of means is steady where a mean of ratios is not.

    every: updates from one measurement to the next. It is the same on every rank.
    """

    def __init__(self, *, every: int) -> None:
        self.every = every
        self.signal = self.spread = self.weight = 0.0

    def due(self, update: int) -> bool:
        """Whether this update, from 1 on, is to be measured."""
        return update % self.every == 0

    def see(self, *, small: float, large: float, part: float, whole: float) -> None:
        """One more measurement: squared norms of the mean gradients over `part` and over `whole` tokens (labels)."""
        signal = (whole * large - part * small) / (whole - part)
        spread = (small - large) / (1 / part - 1 / whole)
        self.signal = SMOOTHING * self.signal + (1 - SMOOTHING) * signal
        self.spread = SMOOTHING * self.spread + (1 - SMOOTHING) * spread
        self.weight = SMOOTHING * self.weight + (1 - SMOOTHING)

    @property
    def scale(self) -> float | None:
        """B_simple in tokens; None while noise hides either of the two."""
        return self.spread / self.signal if self.signal > 0 and self.spread > 0 else None

    def facts(self) -> dict[str, float]:
        """For metrics.jsonl: |G|^2, tr(S) (of one token), and their ratio where there is one."""
        facts = {"noise_signal": self.signal / self.weight, "noise_spread": self.spread / self.weight}
        return facts | ({} if self.scale is None else {"noise_scale": self.scale})

    def state(self) -> dict[str, float]:
        """Enough to go on."""
        return {"signal": self.signal, "spread": self.spread, "weight": self.weight}

    def restore(self, state: Mapping[str, float]) -> None:
        """It goes on from a state."""
        self.signal, self.spread, self.weight = (float(state[name]) for name in ("signal", "spread", "weight"))


class BatchAdvice:
    """Says whether a larger batch would help: once, and again when that has changed for good."""

    def __init__(self) -> None:
        self.measured = 0
        self.told: str | None = None
        self._last: tuple[str | None, int] = (None, 0)  # the newest verdict, and how often in a row

    def advice(self, report: Report) -> str | None:
        """The sentence, where this report brings one."""
        scale, batch = report.extra.get("noise_scale"), sum(float(weight) for weight in report.weights.values())
        if scale is None or not batch:
            return None
        self.measured += 1
        ratio = scale / batch
        verdict = "larger" if ratio > ABOVE else "smaller" if ratio < BELOW else "right"
        self._last = (verdict, self._last[1] + 1 if verdict == self._last[0] else 1)
        if self.measured < LEAST or verdict == self.told or self._last[1] < STEADY:
            return None
        self.told = verdict
        return _sentence(verdict, scale, batch)


def _sentence(verdict: str, scale: float, batch: float) -> str:
    """Updates to a given loss go as 1 + scale / batch, tokens as 1 + batch / scale (equations 2.7 and 2.11)."""
    fewer_updates = 1 - (1 + scale / (2 * batch)) / (1 + scale / batch)
    more_tokens = (1 + 2 * batch / scale) / (1 + batch / scale) - 1
    half_tokens = 1 - (1 + batch / (2 * scale)) / (1 + batch / scale)
    known = (
        f"The gradient noise scale is about {scale:,.0f} tokens, {scale / batch:.2g} times the batch of {batch:,.0f}: "
    )
    match verdict:
        case "larger":
            return (
                f"{known}a larger batch helps. Twice as large, about {fewer_updates:.0%} fewer updates reach the same "
                f"loss, for about {more_tokens:.0%} more tokens."
            )
        case "smaller":
            return (
                f"{known}a larger batch does not help. Half as large, the same loss takes about {half_tokens:.0%} "
                "fewer tokens."
            )
    return (
        f"{known}the batch is about right. Twice as large, about {fewer_updates:.0%} fewer updates reach the same "
        f"loss, for about {more_tokens:.0%} more tokens."
    )
