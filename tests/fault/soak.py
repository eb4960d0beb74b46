"""One long run under random faults of every kind, held against the same run that was left alone.

Nothing is random but what the seed says, and the moments, which only the clock knows: after each fault the run goes a
few updates on, however slow the machine is, for it may never go further than a file allows (`runs.Gate`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from danlu.checkpoint.manifest import verify
from tests.fault import runs
from tests.fault.runs import Gate, Moment

STRIDE = 10  # updates that a fault may take, at most
LIMIT_SECONDS = 900.0  # for what must come, on a machine with much else to do
PASSING = ("stopped for a while", "disk full for a while")
ENDING = (
    "all killed",
    "one rank killed",
    "told by SIGTERM",
    "told by SIGINT",
    "an exception on one rank",
    "killed in a save",
    "newest checkpoint damaged",
)
POISON = "a batch that is not finite, on one rank"
IN_A_SAVE = (  # where, and whether every rank comes there
    (("danlu.checkpoint.commit", "write_part"), True),
    (("danlu.checkpoint.shard", "digest"), True),
    (("danlu.checkpoint.commit", "commit"), False),
    (("danlu.checkpoint.disk", "Disk.rename"), False),
    (("danlu.checkpoint.commit", "prune"), False),
)


@dataclass(frozen=True)
class Life:
    """What one start of the run is prepared with: the gate, batches that are poisoned at their step, a disk that is
    full while a file is there, and perhaps a moment at which it ends."""

    gate: Gate
    poisoned: dict[int, int]  # step -> rank
    full: Path
    moment: Moment | None = None

    def __call__(self) -> None:
        """The process is prepared."""
        from danlu.checkpoint.disk import Disk
        from danlu.train import loop

        loop.BEREFT_SECONDS = 0.2
        self._poison()
        if self.moment:
            self.moment()
        self.gate()
        append = Disk.append

        def limited(disk: Disk, handle: int, content: bytes | memoryview) -> None:
            if self.full.exists():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            append(disk, handle, content)

        Disk.append = limited  # type: ignore[method-assign]

    def _poison(self) -> None:
        from danlu.compute.layer import ComputeLayer
        from danlu.train import loop

        whole, work, rank, now = loop.step, ComputeLayer.forward_backward, int(os.environ.get("RANK", "0")), 0

        def step(run: Any, *rest: Any) -> Any:
            nonlocal now
            now = run.step + 1
            return whole(run, *rest)

        def forward_backward(layer: Any, micros: Any, loss: Any, *rest: Any, **named: Any) -> Any:
            def poisoned(out: Any, batch: Any) -> Any:
                total, terms = loss(out, batch)
                return total * math.nan, type(terms)({name: term * math.nan for name, term in terms.items()})

            met = self.poisoned.get(now) == rank
            return work(layer, micros, poisoned if met else loss, *rest, **named)

        loop.step, ComputeLayer.forward_backward = step, forward_backward  # type: ignore[assignment, method-assign]


@dataclass
class Outcome:
    """What a soak came to. `silent` holds a sentence for each thing that went wrong without being said."""

    seed: int
    ranks: int
    faults: Counter[str] = field(default_factory=Counter)
    silent: list[str] = field(default_factory=list)
    updates: int = 0
    computed: int = 0
    lost: int = 0
    seconds: float = 0.0
    unhurt_seconds: float = 0.0
    hash: str = ""
    unhurt_hash: str = ""

    @property
    def goodput(self) -> float:
        """Updates of the run over updates that were computed, repeated ones included."""
        return self.updates / max(self.computed, 1)

    def __str__(self) -> str:
        kinds = ", ".join(f"{name} {count}" for name, count in sorted(self.faults.items()))
        return (
            f"seed {self.seed}, {self.ranks} ranks: {self.faults.total()} faults / {self.lost} lost updates / "
            f"{len(self.silent)} silent errors; goodput {self.goodput:.2f} ({self.updates} updates, {self.computed} "
            f"computed); {self.seconds:.0f} s, left alone {self.unhurt_seconds:.0f} s; end "
            f"{'equal' if self.hash == self.unhurt_hash else 'NOT equal'} ({self.hash[:16]}); {kinds}"
        )


def soak(folder: Path, *, ranks: int, faults: int, seed: int, say: Callable[[str], None] = print) -> Outcome:
    """The run has met so many faults and come to its end, and so has the one that was left alone."""
    say(f"soak: seed {seed}, {ranks} ranks, {faults} faults")
    return _Soak(folder, ranks=ranks, faults=faults, seed=seed).go()


class _Soak:
    def __init__(self, folder: Path, *, ranks: int, faults: int, seed: int) -> None:
        self.draw, self.ranks = random.Random(seed), ranks
        self.outcome = Outcome(seed=seed, ranks=ranks)
        poisons = max(1, faults // 10)
        self.plan: list[str] = []
        while len(self.plan) < faults - poisons:
            self.plan += self.draw.sample(PASSING + ENDING, len(PASSING + ENDING))
        del self.plan[faults - poisons :]
        total = STRIDE * (len(self.plan) + 1)
        places = self.draw.sample(range(2, total - 1), poisons)
        self.poisoned = {place: self.draw.randrange(ranks) for place in places}
        self.outcome.faults[POISON] += poisons
        self.reference = runs.write_recipe(folder / "unhurt", steps=total)
        self.recipe = runs.write_recipe(folder / "hurt", steps=total)
        self.outcome.updates = total
        self.gate = Gate(folder / "gate")
        self.full = folder / "full"
        self.processes: list[Any] = []
        self.expected: dict[str, str] | None = None  # the damaged checkpoint that the next start must not take

    def go(self) -> Outcome:
        outcome = self.outcome
        begun = time.monotonic()
        wide = Gate(self.gate.path.with_name("wide"))
        wide.open(1 << 30)
        left_alone = replace(self._life(), gate=wide)
        codes = runs.end(runs.start(self.reference, prepare=left_alone, ranks=self.ranks), seconds=LIMIT_SECONDS)
        assert set(codes) == {0}, runs.said(self.reference)
        outcome.unhurt_seconds, begun = time.monotonic() - begun, time.monotonic()
        self.gate.open(0)
        for number, kind in enumerate(self.plan):
            self._meet(kind, STRIDE * number)
            outcome.faults[kind] += 1
        self.gate.open(1 << 30)
        self._alive()
        codes = runs.end(self.processes, seconds=LIMIT_SECONDS)
        assert set(codes) == {0}, f"{codes}\n{runs.said(self.recipe)}"
        outcome.seconds = time.monotonic() - begun
        self._compare()
        return outcome

    def _life(self, moment: Moment | None = None) -> Life:
        return Life(gate=self.gate, poisoned=self.poisoned, full=self.full, moment=moment)

    def _alive(self, moment: Moment | None = None) -> None:
        """The run is on its way; one that was not is started, and has taken up what it should."""
        if self.processes:
            return
        self.processes = runs.start(self.recipe, prepare=self._life(moment), ranks=self.ranks)

    def _meet(self, kind: str, first: int) -> None:
        """The run, somewhere between `first` and the updates that one fault may take, has met the fault."""
        draw = self.draw
        before, goes_on = draw.randint(1, STRIDE - 5), 4  # updates before it; and meanwhile, at most
        if kind in ("killed in a save", "an exception on one rank"):
            self._end_life()
            self._alive(self._moment(kind))
            self.gate.open(first + STRIDE)
            self._ended(kind)
            return
        self._alive()
        self.gate.open(first + before)
        self._reach(first + before)
        self.gate.open(first + before + goes_on)
        time.sleep(draw.uniform(0, 0.08))
        some = draw.choice(self.processes)
        if kind == "stopped for a while":
            os.kill(some.pid, signal.SIGSTOP)
            time.sleep(draw.uniform(0.1, 0.6))
            os.kill(some.pid, signal.SIGCONT)
        elif kind == "disk full for a while":
            self.full.touch()
            self._reach(first + before + goes_on)
            self.full.unlink()
        elif kind.startswith("told by "):
            number = signal.Signals[kind.removeprefix("told by ")]
            for process in self.processes if draw.random() < 0.5 else [some]:
                os.kill(process.pid, number)
            self.gate.open(first + STRIDE)
            self._ended(kind)
        else:
            for process in [some] if kind == "one rank killed" else self.processes:
                process.kill()
            self._ended(kind)
            if kind == "newest checkpoint damaged":
                self._damage()

    def _moment(self, kind: str) -> Moment:
        """Where a process of the next life ends by itself."""
        rank = self.draw.randrange(self.ranks)
        if kind == "an exception on one rank":
            return Moment("danlu.train.loop", "step", self.draw.randint(2, 5), rank=rank, fault="a fault of the soak")
        (module, name), everywhere = self.draw.choice(IN_A_SAVE)
        return Moment(module, name, self.draw.randint(1, 2), rank=rank if everywhere else 0)

    def _end_life(self) -> None:
        """No process is left, killed where there was one: the next one is prepared anew. It counts as no fault."""
        for process in self.processes:
            process.kill()
        if self.processes:
            self._ended("all killed")

    def _reach(self, step: int) -> None:
        """The run has made so many updates."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while self.gate.at() < step:
            late = time.monotonic() > deadline or any(p.exitcode is not None for p in self.processes)
            assert not late, f"at {self.gate.at()} of {step}: {runs.said(self.recipe)[-3000:]}"
            time.sleep(0.005)

    def _ended(self, kind: str) -> None:
        """All processes have ended, with the codes that the fault explains; the next start has nothing to believe."""
        codes = sorted(runs.end(self.processes, seconds=LIMIT_SECONDS))
        self.processes = []
        fine = {
            "told by SIGTERM": [75] * self.ranks,
            "told by SIGINT": [75] * self.ranks,
            "an exception on one rank": [1] * self.ranks,
            "one rank killed": [-9] + [1] * (self.ranks - 1),
            "killed in a save": [-9] + [1] * (self.ranks - 1),
        }.get(kind, [-9] * self.ranks)
        if codes != fine:
            said = runs.said(self.recipe)[-600:]
            self.outcome.silent.append(f"{kind}: ended with {codes}, not {fine}; said: {said}")

    def _damage(self) -> None:
        """One bit of the newest checkpoint is another, or one of its files is shorter, if there is one before it."""
        folder = runs.folder(self.recipe) / "checkpoints"
        whole = sorted(path for path in folder.glob("step-*") if not verify(path))
        if len(whole) < 2:
            return
        path = self.draw.choice(sorted(whole[-1].iterdir()))
        content = bytearray(path.read_bytes())
        if self.draw.random() < 0.5:
            content[self.draw.randrange(len(content))] ^= 1 << self.draw.randrange(8)
        else:
            del content[self.draw.randrange(len(content)) :]
        path.write_bytes(content)
        self.expected = {"damaged": whole[-1].name, "file": path.name, "taken": whole[-2].name}
        seen = len(runs.events(self.recipe, "resumed"))
        self.gate.open(0)
        self._alive()
        while len(runs.events(self.recipe, "resumed")) == seen:
            assert all(p.exitcode is None for p in self.processes), runs.said(self.recipe)[-3000:]
            time.sleep(0.01)
        *_, resumed = runs.events(self.recipe, "resumed")
        told = any(self.expected["damaged"] in text and path.name in text for text in resumed["skipped"])
        if resumed["checkpoint"] != self.expected["taken"] or not told:
            self.outcome.silent.append(f"{self.expected} came to {resumed}")

    def _compare(self) -> None:
        """Lost updates, and what differs at the end."""
        outcome, recipe, reference = self.outcome, self.recipe, self.reference
        ours = {line["step"]: line for line in runs.metrics(recipe)}
        theirs = {line["step"]: line for line in runs.metrics(reference)}
        outcome.lost = sum(ours.get(step) != line for step, line in theirs.items())
        outcome.computed = sum(
            json.loads(line)[0] == 0 for line in (recipe.parent / "samples.txt").read_text().splitlines() if line
        )
        with contextlib.suppress(AssertionError):
            outcome.hash, outcome.unhurt_hash = _hash(recipe), _hash(reference)
        for name, equal in (
            ("metrics", len(runs.metrics(recipe)) == len(theirs) and not outcome.lost),
            ("samples", runs.samples(recipe) == runs.samples(reference)),
            ("the end", bool(outcome.hash) and outcome.hash == outcome.unhurt_hash),
        ):
            if not equal:
                outcome.silent.append(f"{name}: not those of the run left alone")


def _hash(recipe: Path) -> str:
    """Of what a run came to: published weights, the last checkpoint's weights and moments, metrics, samples."""
    state = hashlib.sha256(runs.weights(recipe))
    last = sorted((runs.folder(recipe) / "checkpoints").glob("step-*"))[-1]
    for shard in sorted(last.glob("*.safetensors")):
        state.update(shard.read_bytes())
    state.update(json.dumps(runs.metrics(recipe)).encode())
    state.update(repr(sorted(runs.samples(recipe).items())).encode())
    return state.hexdigest()
