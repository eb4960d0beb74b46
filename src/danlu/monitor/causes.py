"""What is likely behind an illness of a run, and what would help: one name and one remedy each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Likely(StrEnum):
    """The likely cause, by the name that stands in events.jsonl as ``likely``."""

    RATE = "rate too high"
    LABELS = "no labels"
    OVERFLOW = "fp16 overflow"
    FROZEN = "nothing trains"
    DATA = "data or their order"
    LAYER = "dead layer"
    DEPTH = "gradients explode or vanish with depth"
    SLOW = "converged, or rate too low"
    UNKNOWN = "not known"


REMEDIES = {
    Likely.RATE: "A lower optimizer.learning_rate (a third, to begin with) or a longer optimizer.schedule.warmup_steps "
    "usually helps; danlu rollback RUN --to STEP optimizer.learning_rate=… goes on with it from before.",
    Likely.LABELS: "`danlu check RECIPE` shows a batch: is every token masked out?",
    Likely.OVERFLOW: "fp16 holds nothing above 65504: memory.precision: bf16 or fp32 does.",
    Likely.FROZEN: "Is optimizer.learning_rate 0, is every weight frozen, or is the loss constant?",
    Likely.DATA: "Look at the samples named in events.jsonl, and whether the text is shuffled, whole, and what it "
    "should be; `danlu check RECIPE` shows a batch.",
    Likely.LAYER: "No gradient comes through it: are its outputs used, is it frozen or saturated, and are its first "
    "values and its normalisation right?",
    Likely.DEPTH: "Are the first values and the normalisation of that layer right? A lower "
    "optimizer.learning_rate bears more.",
    Likely.SLOW: "Nothing need be done if the loss is as low as it can be; else a higher optimizer.learning_rate or a "
    "larger model is worth a try.",
    Likely.UNKNOWN: "A lower optimizer.learning_rate, a longer warm-up or memory.precision: fp32 usually helps.",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to tell: a kind for the log of events, one sentence, and what is likely behind it, if that is known."""

    kind: str
    cause: str
    likely: Likely | None = None

    @property
    def sentence(self) -> str:
        """All of it, for a person."""
        return self.cause if self.likely is None else f"{self.cause} {remedy(self.likely)}"

    def facts(self) -> dict[str, object]:
        """All of it, for events.jsonl."""
        more = {} if self.likely is None else {"likely": str(self.likely), "remedy": REMEDIES[self.likely]}
        return {"cause": self.cause, **more}


def remedy(likely: Likely) -> str:
    """Two sentences: what is likely behind it, and what would help."""
    if likely is Likely.UNKNOWN:
        return REMEDIES[likely]
    return f"Likely cause: {likely}. {REMEDIES[likely]}"
