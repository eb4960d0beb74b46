"""torch.compile, block by block: whether it pays, and blocks whose training runs as compiled code.

All blocks are alike, so that one compiled code serves them all, and the cost does not grow with their number.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from danlu.compute import graphs
from danlu.core.paths import write_whole

Compile = bool | Literal["auto", "graphs"]
Say = Callable[[str], None]

# Seconds until the first block has run: measured for a Llama of 384 x 6 on two cores; on a GPU a guess.
COLD, WARM = {"cpu": 30.0, "cuda": 40.0}, {"cpu": 8.0, "cuda": 8.0}
# Share of an update's time that is saved: on a CPU measured beside a plain compiled loop, on a GPU a guess.
GAIN = {"cpu": 0.12, "cuda": 0.2}
# Where errors of compiling come from, by name: to import them would cost every start a second.
COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch")
MARGIN = 2.0  # how many times over it must repay: both sides are estimates
USE = 0.5  # share of the peak rate at which an update is taken to run


@dataclass(frozen=True, slots=True)
class Choice:
    """Whether blocks are compiled, as the recipe is to keep it, and the sentence that says why."""

    compile: bool | Literal["graphs"]
    why: str

    @property
    def on(self) -> bool:
        """Whether they are."""
        return self.compile is not False


def choose(
    asked: Compile, *, device: torch.device, ranks: int, updates: int, seconds: float, cost: Cost | None = None
) -> Choice:
    """Settles `auto`, and what cannot be done here is not done; `why` says it.

    updates, seconds: of the run, and of one update as it would be without. Raises InputError for graphs where there
    can be none.
    """
    if asked == "graphs":
        graphs.refuse(device, ranks=ranks)
    if asked is False:
        return Choice(False, "compile: off, as asked")
    if missing := lacking(device):
        said = "true" if asked is True else asked
        return Choice(False, f"compile {said}: off, since {missing}; blocks run as written")
    if asked != "auto":
        return Choice(asked, "compile: blocks are compiled, as asked")
    cost = cost or Cost(COLD[device.type], "estimated")
    saved = updates * seconds * GAIN[device.type]
    figures = f"about {_span(saved)} saved over {updates} updates, {_span(cost.seconds)} to compile ({cost.known})"
    if saved > MARGIN * cost.seconds:
        return Choice(True, f"compile auto: on; {figures}")
    return Choice(False, f"compile auto: off, the run is too short to repay it; {figures}")


def lacking(device: torch.device) -> str:
    """What compiled code would need and this machine has not; empty where nothing is known to be missing."""
    if device.type == "cpu" and not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        return "there is no C++ compiler (install g++ or clang)"
    if device.type == "cuda" and find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    if device.type not in GAIN:
        return f"it is not known to pay on {device.type}"
    return ""


def seconds_of(flops: float, *, peak: float | None) -> float:
    """Seconds that an update of so many FLOPs on this rank takes, by the device's peak rate (None: 50 TFLOP/s)."""
    return flops / (USE * (peak or 5e13))


@dataclass(frozen=True, slots=True)
class Cost:
    """What compiling is expected to cost, in seconds, and whence that is known."""

    seconds: float
    known: str


class Costs:
    """What compiling cost on this machine before, kept beside the compiled code that it left behind.

    facts: all that decides the code (shape, dtypes, sizes, versions).
    """

    def __init__(self, folder: Path, *facts: object) -> None:
        key = hashlib.blake2b("\x1f".join(map(str, (torch.__version__, *facts))).encode(), digest_size=8)
        self.file = folder / "costs" / f"{key.hexdigest()}.json"

    def expected(self, device: torch.device) -> Cost:
        """The cost of compiling now."""
        try:
            known = json.loads(self.file.read_text())
        except (OSError, ValueError):
            return Cost(COLD.get(device.type, 0.0), "estimated: compiled for the first time here")
        if isinstance(known, dict) and isinstance(warm := known.get("warm"), int | float):
            return Cost(float(warm), "measured: compiled before")
        return Cost(WARM.get(device.type, 0.0), "estimated: compiled before")

    def keep(self, seconds: float) -> None:
        """Compiling has cost so much. Where that cannot be written, nothing is lost."""
        name = "warm" if self.file.exists() else "cold"
        try:
            known = json.loads(self.file.read_text()) if self.file.exists() else {}
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.file, json.dumps({**known, name: round(seconds, 2)}).encode())
        except (OSError, ValueError, TypeError):
            return


class Compiled:
    """Blocks that share one compiled code: for forwards with gradient, in batches of one shape.

    Everything else runs as written: evaluation, generation and other shapes would each be compiled anew. Where
    compiling fails, which is said once, all runs as written.

    done: called once with the seconds that compiling took.
    """

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        *,
        say: Say,
        done: Callable[[float], None] = lambda seconds: None,
        backend: str = "inductor",
        options: dict[str, Any] | None = None,
    ) -> None:
        self.say, self.done = say, done
        self.on, self.shape, self.seconds = True, torch.Size(), 0.0
        self.code = torch.compile(_forward, fullgraph=True, dynamic=False, backend=backend, options=options)
        for block in blocks:
            block.forward = partial(self._run, block.forward)

    def _run(self, written: Callable[..., Tensor], hidden: Tensor, *more: Any) -> Tensor:
        """One block's forward. `written` is the same, uncompiled."""
        self.shape = self.shape or hidden.shape
        if not self.on or not torch.is_grad_enabled() or hidden.shape != self.shape:
            return written(hidden, *more)
        if self.seconds:
            return self._compiled(written, hidden, *more)
        start = time.perf_counter()
        out = self._compiled(written, hidden, *more)
        self.seconds = time.perf_counter() - start
        if self.on:
            self.say(f"compile: the blocks' code was ready after {self.seconds:.1f} s")
            self.done(self.seconds)
        return out

    def _compiled(self, written: Callable[..., Tensor], hidden: Tensor, *more: Any) -> Tensor:
        try:
            return self.code(written, hidden, *more)
        except Exception as error:
            if not type(error).__module__.startswith(COMPILERS):
                raise
            self.on = False
            first = str(error).strip().partition("\n")[0][:200]
            self.say(f"compile: it failed ({type(error).__name__}: {first}); from here on blocks run as written")
            return written(hidden, *more)


def _forward(written: Callable[..., Tensor], hidden: Tensor, *more: Any) -> Tensor:
    return written(hidden, *more)


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
