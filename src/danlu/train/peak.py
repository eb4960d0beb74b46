"""The forecast of memory against what was really held, once in a run: in an update like those that are forecast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import psutil
import torch

from danlu.core import words
from danlu.core.log import logger
from danlu.core.report import Report
from danlu.memory.ledger import forecast, kept
from danlu.memory.tracker import Tracker
from danlu.train.assemble import Materials
from danlu.train.run import Run


def facts(materials: Materials) -> dict[str, Any]:
    """The ledger's forecast for one rank, as the record of a start holds it."""
    case = materials.case
    ledger = forecast(case)
    return {
        "forecast_bytes": ledger.peak,
        "forecast_moment": ledger.moment,
        "forecast_parts": {part: size for part, size in ledger.parts.items() if size},
        "micro_batch_size": case.rows,
        "blocks": [{"recompute": kind, "kept_bytes": sum(kept(case, kind).values())} for kind in case.kinds],
    }


class Peak:
    """Looks at the second update that a process makes, which has all moments, or the first full one after it: not at a
    ramp's smaller ones, nor at one whose only micro-batch is run in halves.

    On a CPU the memories of tensors are counted one by one, which slows that update down a little; a GPU's allocator
    knows. Compiled code is not looked into: then only the process's resident size is told.
    """

    def __init__(self, run: Run, materials: Materials, *, ahead: int = 2) -> None:
        """ahead: 1 is the next update, 2 the one after it."""
        self.materials, self.earliest = materials, run.step + ahead
        self.update: int | None = None  # the one that is looked at, once it comes
        self.tracked = materials.device.type == "cpu" and not materials.compiled.on
        self.tracker: Tracker | None = None
        self.need = forecast(materials.case).peak
        self.held: int | None = None
        self.resident = 0

    @contextmanager
    def watching(self, run: Run) -> Iterator[None]:
        """An update is made inside."""
        if self.update is None and run.step + 1 >= self.earliest and self._like_most(run):
            self.update = run.step + 1
        if not self.tracked or run.step + 1 != self.update:
            yield
            return
        self.tracker = Tracker()
        self.tracker.hold("weights", run.weights.values())
        self.tracker.hold("moments", run.optim.here())
        blocks = {f"blocks.{name}": block for name, block in run.compute.model.blocks.items()}
        with self.tracker, self.tracker.within(blocks), self.tracker.gradients(run.weights.values()):
            yield

    def told(self, report: Report, tell: Callable[..., None] | None = None) -> Report:
        """The report, with what was found in this update, if it is the one; `tell` and the log then hear of it."""
        if report.step != self.update:
            return report
        parts = {} if self.tracker is None else {"held_parts": self.tracker.parts()}
        self.held = self.tracker.peak if self.tracker else self._allocated()
        self.resident, self.tracker = psutil.Process().memory_info().rss, None
        found = {"forecast_bytes": self.need, "held_bytes": self.held, "resident_bytes": self.resident}
        if tell is not None:
            tell("memory", step=report.step, **found, **parts)
            logger.info("memory: %s", self.sentence())
        more = {f"memory_{name}": float(value) for name, value in found.items() if value is not None}
        return replace(report, extra={**report.extra, **more})

    def sentence(self) -> str:
        """What was found, beside the forecast."""
        held = "" if self.held is None else f"{words.size(self.held)} of tensors at most in an update, "
        return f"{held}{words.size(self.need)} forecast; the process is {words.size(self.resident)}"

    def _like_most(self, run: Run) -> bool:
        """Whether the next update is as the ledger has it: of all rows, in micro-batches of full size."""
        rows, at, noise = self.materials.rows, run.source.state(), run.noise
        full = rows.sizes.at(at["samples"] - at.get("passed", 0)) == rows.global_batch_size
        halved = noise is not None and noise.every > 1 and noise.due(run.step + 1) and self.materials.micros == 1
        return full and not halved

    def _allocated(self) -> int | None:
        device = self.materials.device
        return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
