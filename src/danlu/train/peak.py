"""The forecast of memory against what was really held, once in a run: in its second update, which has all moments."""

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
from danlu.memory.ledger import forecast
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
        "recompute": list(case.kinds),
    }


class Peak:
    """Looks at the second update that a process makes.

    On a CPU the memories of tensors are counted one by one, which slows that update down a little; a GPU's allocator
    knows. Compiled code is not looked into: then only the process's resident size is told.
    """

    def __init__(self, run: Run, materials: Materials) -> None:
        self.materials, self.update = materials, run.step + 2
        self.tracked = materials.device.type == "cpu" and not materials.compiled.on
        self.tracker: Tracker | None = None

    @contextmanager
    def watching(self, run: Run) -> Iterator[None]:
        """An update is made inside."""
        if not self.tracked or run.step + 1 != self.update:
            yield
            return
        self.tracker = Tracker()
        self.tracker.hold("weights", run.weights.values())
        self.tracker.hold("moments", run.optim.here())
        blocks = {f"blocks.{name}": block for name, block in run.compute.model.blocks.items()}
        with self.tracker, self.tracker.within(blocks), self.tracker.gradients(run.weights.values()):
            yield

    def told(self, report: Report, tell: Callable[..., None]) -> Report:
        """The report, with what was found in this update, if it is the one; the event and the log tell of it."""
        if report.step != self.update:
            return report
        need = forecast(self.materials.case).peak
        held = self.tracker.peak if self.tracker else self._allocated()
        resident = psutil.Process().memory_info().rss
        parts = {} if self.tracker is None else {"held_parts": self.tracker.parts()}
        self.tracker = None
        tell("memory", step=report.step, forecast_bytes=need, held_bytes=held, resident_bytes=resident, **parts)
        found = "" if held is None else f"{words.size(held)} of tensors at most in an update, "
        logger.info("memory: %s%s forecast; the process is %s", found, words.size(need), words.size(resident))
        more = {"memory_forecast_bytes": float(need), "memory_resident_bytes": float(resident)}
        if held is not None:
            more["memory_held_bytes"] = float(held)
        return replace(report, extra={**report.extra, **more})

    def _allocated(self) -> int | None:
        device = self.materials.device
        return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
