"""Norms layer by layer: which gradients explode, vanish, or do not come at all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from danlu.core.config import setting
from danlu.monitor.causes import Finding, Likely
from danlu.monitor.usual import median

GRADIENT, WEIGHT = "grad_norm/", "weight_norm/"  # before a layer's name in metrics.jsonl
ALWAYS = 3  # looks in a row after which it is no chance


@dataclass(frozen=True, kw_only=True)
class Layers:
    """How the gradients and weights of each layer are watched."""

    steps: int = setting(50, "updates between two looks at the norms of each layer's gradients and weights", at_least=1)
    exploding: float = setting(
        100.0, "times the median of all blocks at which a block's gradient norm counts as exploding", above=1
    )
    vanishing: float = setting(
        0.001,
        "share of the median of all blocks at which a block's gradient norm counts as vanishing",
        above=0,
        below=1,
    )

    def due(self, step: int) -> bool:
        """Whether the layers are looked at in this update: the first, and every so many."""
        return step == 1 or step % self.steps == 0


class Strata:
    """Sees the layers' norms at each look. ``dead``: layers that no gradient reached, look after look."""

    def __init__(self, settings: Layers) -> None:
        self.settings = settings
        self._counts: dict[str, dict[str, int]] = {}  # what, layer: looks in a row
        self._said: set[str] = set()

    @property
    def dead(self) -> tuple[str, ...]:
        """Layers without a gradient."""
        return tuple(layer for layer, times in self._counts.get("dead", {}).items() if times >= ALWAYS)

    def see(self, step: int, extra: Mapping[str, float]) -> list[Finding]:
        """What there is to tell of a look; nothing where there was none, or nothing new."""
        norms = {n.removeprefix(GRADIENT): v for n, v in extra.items() if n.startswith(GRADIENT) and math.isfinite(v)}
        if not norms or not any(norms.values()):
            return []  # no look, or no gradient at all: that is not the layers' illness
        blocks = [value for layer, value in norms.items() if layer.startswith("blocks.") and value > 0]
        usual = median(blocks or [value for value in norms.values() if value > 0])
        findings: list[Finding] = []
        for layer, value in norms.items():
            dead = value == 0
            block = layer.startswith("blocks.")
            self._count("dead", layer, dead)
            self._count("exploding", layer, block and value > self.settings.exploding * usual)
            self._count("vanishing", layer, block and not dead and value < self.settings.vanishing * usual)
            share = f"{value:.3g}, where the median of the blocks is {usual:.3g}"
            self._tell(findings, "dead", layer, f"No gradient has reached {layer} in {ALWAYS} looks, to step {step}.")
            self._tell(findings, "exploding", layer, f"The gradient of {layer} is exploding, to step {step}: {share}.")
            self._tell(findings, "vanishing", layer, f"The gradient of {layer} is vanishing, to step {step}: {share}.")
        return findings

    def _count(self, what: str, layer: str, so: bool) -> None:
        counts = self._counts.setdefault(what, {})
        if so:
            counts[layer] = counts.get(layer, 0) + 1
        else:
            counts.pop(layer, None)
            self._said.discard(f"{what} {layer}")

    def _tell(self, findings: list[Finding], what: str, layer: str, cause: str) -> None:
        key = f"{what} {layer}"
        if self._counts[what].get(layer, 0) >= ALWAYS and key not in self._said:
            self._said.add(key)
            kind = "dead_layer" if what == "dead" else what
            findings.append(Finding(kind, cause, Likely.LAYER if what == "dead" else Likely.DEPTH))

    def state(self) -> dict[str, Any]:
        """Enough to go on as if never interrupted."""
        return {"counts": self._counts, "said": sorted(self._said)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """All is as it was."""
        self._counts = {what: dict(counts) for what, counts in state["counts"].items()}
        self._said = set(state["said"])
