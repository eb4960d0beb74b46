"""torch.compile, block by block: whether it pays, and blocks whose training runs as compiled code.

All blocks are alike, so that one compiled code serves them all, and the cost does not grow with their number.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
import torch._functorch.config as functorch
from torch import Tensor, nn

from danlu.compute import graphs
from danlu.core.contracts import Cache
from danlu.core.paths import write_whole
from danlu.models.attention import Scope
from danlu.models.rope import Rotation

Compile = bool | Literal["auto", "graphs"]
Forward = Callable[[Tensor, Rotation | None, Scope, Cache | None], Tensor]
Say = Callable[[str], None]

BACKEND = "inductor"

# Seconds until the first block has run: measured for a Llama of 384 x 6 on two cores; on a GPU a guess.
COLD, WARM = {"cpu": 30.0, "cuda": 40.0}, {"cpu": 8.0, "cuda": 8.0}
# Share of an update's time that is saved: on a CPU 0.17 was measured in fp32 and 0.27 in bf16; on a GPU a guess.
GAIN = {"cpu": 0.17, "cuda": 0.2}
# Where errors of compiling come from, by name: to import them would cost every start a second.
COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch")
# What keeps a compiled block from making again, in its backward, what is cheap (norms, products of numbers; never a
# matrix product, nor attention). Lifted on a CPU: a third less is kept, in the same time (LOG.md).
CHEAP = (
    "ban_recompute_used_far_apart",
    "ban_recompute_long_fusible_chains",
    "ban_recompute_materialized_backward",
)
MARGIN = 2.0  # how many times over it must repay: both sides are estimates
USE = 0.5  # share of the peak rate at which an update is taken to run
SLOWEST, UNKNOWN = 5e9, 5e13  # FLOP/s: below what any device runs at; of a device whose peak nobody knows


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
    asked: Compile,
    *,
    device: torch.device,
    ranks: int,
    updates: int,
    flops: float,
    peak: Callable[[], float | None],
    cost: Cost,
) -> Choice:
    """Settles `auto`, and what cannot be done here is not done; `why` says it.

    updates: of the run; flops: of an update on one rank; peak: asks for the device's peak rate, FLOP/s (None: not
    known), only where the answer matters. Raises InputError for graphs where there can be none.
    """
    if asked == "graphs":
        graphs.refuse(device, ranks=ranks)
    if asked is False:
        return Choice(False, "compile: off, as asked")
    if missing := lacking(device):
        return Choice(False, f"compile {str(asked).lower()}: off, since {missing}; blocks run as written")
    if asked != "auto":
        return Choice(asked, "compile: blocks are compiled, as asked")
    gain, needed = GAIN[device.type] * updates, MARGIN * cost.seconds
    about = f"saved over {updates} updates, {_span(cost.seconds)} to compile ({cost.known})"
    most = gain * flops / SLOWEST
    if most <= needed:
        return Choice(False, f"compile auto: off, the run is too short to repay it: at most {_span(most)} {about}")
    saved = gain * flops / (USE * (peak() or UNKNOWN))
    if saved <= needed:
        return Choice(False, f"compile auto: off, the run is too short to repay it: about {_span(saved)} {about}")
    return Choice(True, f"compile auto: on: about {_span(saved)} {about}")


def lacking(device: torch.device) -> str:
    """What compiled code would need and this machine has not; empty where nothing is known to be missing."""
    if device.type == "cpu" and not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        return "there is no C++ compiler (install g++ or clang)"
    if device.type == "cuda" and find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    if device.type not in GAIN:
        return f"it is not known to pay on {device.type}"
    return ""


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

    rows: of the batches that are compiled for; None: as many as the first has. done: called once with the seconds that
    compiling took. again: whether, on a CPU, what is cheap is made again in the backward.
    """

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        *,
        say: Say,
        done: Callable[[float], None] = lambda seconds: None,
        rows: int | None = None,
        again: bool = True,
        backend: str = BACKEND,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.say, self.done, self.rows, self.again = say, done, rows, again
        self.settings: AbstractContextManager[None] | None = None
        self.on, self.shape, self.seconds = True, torch.Size(), 0.0
        self.code = torch.compile(_forward, fullgraph=True, dynamic=False, backend=backend, options=options)
        for block in blocks:
            block.forward = partial(self._run, block.forward)

    def _run(
        self,
        written: Forward,
        hidden: Tensor,
        turn: Rotation | None,
        seen: Scope,
        cache: Cache | None = None,
    ) -> Tensor:
        """One block's forward. `written` is the same, uncompiled."""
        if torch.is_grad_enabled() and self.rows in (None, hidden.shape[0]):
            self.shape = self.shape or hidden.shape
        if not self.on or not torch.is_grad_enabled() or hidden.shape != self.shape:
            return written(hidden, turn, seen, cache)
        if seen.cuts is not None:  # there are as many as documents: one code for any number
            torch._dynamo.mark_dynamic(seen.cuts, 0)
        start = time.perf_counter()
        out = self._compiled(written, hidden, turn, seen)
        if self.on and not self.seconds:
            self.seconds = time.perf_counter() - start
            self.say(f"compile: the blocks' code was ready after {self.seconds:.1f} s")
            self.done(self.seconds)
        return out

    def _compiled(self, written: Forward, hidden: Tensor, turn: Rotation | None, seen: Scope) -> Tensor:
        if self.settings is None:  # made once: each leaves a variable behind in the thread's context
            lifted = CHEAP if hidden.is_cpu and self.again else ()
            changes = {"autograd_cache_allow_custom_autograd_functions": True, **dict.fromkeys(lifted, False)}
            self.settings = functorch.patch(changes)
        try:
            with self.settings:
                return self.code(written, hidden, turn, seen)
        except Exception as error:
            if not type(error).__module__.startswith(COMPILERS) and not str(error).startswith("torch.compile"):
                raise
            self.on = False
            why = " ".join(str(error).split())[:200]
            self.say(f"compile: it failed ({type(error).__name__}: {why}); from here on blocks run as written")
            return written(hidden, turn, seen, None)


def _forward(written: Forward, hidden: Tensor, turn: Rotation | None, seen: Scope) -> Tensor:
    return written(hidden, turn, seen, None)


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
