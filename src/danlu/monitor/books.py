"""A run's own books: metrics.jsonl, events.jsonl, trainer_state.json, and the history that they hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch

from danlu.core import log
from danlu.core.paths import RunFolder, write_whole
from danlu.monitor import jsonl
from danlu.monitor.history import History
from danlu.monitor.reading import finite


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the monitor is told of a run at its start.

    total_steps       updates of the whole run; start_step, those that are done (a resume)
    tokens            tokens read before this start; None: what metrics.jsonl says
    flops_per_token   of forward and backward of the whole model, for MFU; None: not known
    dtype             in which the matrix products are done
    eval_steps, save_steps   updates between evaluations and between saves; None: there are none
    times_read        how many times the data was read after so many updates; None: not known
    epochs            times that the data is to be seen; None: the run's length is given otherwise
    trained           share of the weights that are trained, 0 to 1
    peak_rate         the highest learning rate
    workers, prefetch the recipe's data.workers and data.prefetch, for advice
    """

    total_steps: int
    start_step: int = 0
    tokens: int | None = None
    flops_per_token: float | None = None
    dtype: torch.dtype = torch.float32
    eval_steps: int | None = None
    save_steps: int | None = None
    times_read: Callable[[int], float] | None = None
    epochs: float | None = None
    trained: float = 1.0
    peak_rate: float = math.inf
    micro_batch_size: int | None = None
    workers: int = 1
    prefetch: int = 2
    title: str = ""


class Books:
    """Opened, metrics.jsonl ends at the plan's start step, and the history is what it says.

    A step's line reaches the file at once, or, where an evaluation may belong to it, with the next step; ``flush``
    leaves nothing held. ``full`` says why nothing can be written any more; the run must then stop.
    """

    def __init__(self, folder: RunFolder, plan: Plan, *, logging_steps: int):
        self.step = plan.start_step
        self.full: str | None = None
        self._logging_steps = logging_steps
        self._folder, self._plan = folder, plan
        self._held: dict[str, Any] | None = None
        self._saved: dict[int, str] = {}
        self._warned: set[str] = set()
        folder.root.mkdir(parents=True, exist_ok=True)
        self._events = jsonl.Lines(folder.events)
        self._once: set[tuple[str, object]] = set()  # events of which there is one for each number
        for event in jsonl.lines(folder.events):
            if event.get("event") == "saved" and event["step"] <= plan.start_step and "path" in event:
                self._saved[event["step"]] = event["path"]
            if "number" in event:
                self._once.add((event["event"], event["number"]))
        known = self._open_at(plan.start_step)
        self.tokens = known if plan.tokens is None else plan.tokens

    def add(self, line: dict[str, Any]) -> None:
        """The line of the next step."""
        self._release()
        self.step, self._held = line["step"], line
        if not self._may_be_evaluated():
            self._release()

    def evaluated(self, step: int, loss: float, facts: dict[str, Any]) -> bool:
        """The evaluation is in the step's line if that is the last one, and in events.jsonl. Whether it is the best."""
        best, measured = self.history.evaluated(step, loss), finite({"eval_loss": loss, **facts})
        if self._held is not None and self._held["step"] == step:
            self._held |= measured
        elif self.step == step:  # the run had left before it could evaluate
            self._write(lambda: self._metrics.amend(measured, step=step))
        self.event("evaluated", {"step": step, "eval_loss": loss, "best": best, **facts})
        return best

    def event(self, name: str, facts: dict[str, Any]) -> None:
        """The event stands in events.jsonl, with its step and time. "saved" with a ``path`` is remembered."""
        if name == "saved" and "path" in facts:
            self._saved[facts.get("step", self.step)] = str(facts["path"])
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        self._write(lambda: self._events.add({"event": name, "step": self.step, "time": now, **finite(facts)}))

    def event_once(self, name: str, facts: dict[str, Any], *, of: str) -> None:
        """The event stands in events.jsonl, one only of the number that stands under ``of``."""
        if (name, facts[of]) not in self._once:
            self._once.add((name, facts[of]))
            self.event(name, facts)

    def set_aside(self, name: str, *, after: int) -> None:
        """The lines of metrics.jsonl after a step stand in a file of this name, too, whole."""
        self._release()
        path = self._folder.aside / name
        path.parent.mkdir(parents=True, exist_ok=True)
        self._write(lambda: write_whole(path, jsonl.after(self._folder.metrics, after)))

    def go_back(self, step: int) -> None:
        """The run goes on from an earlier step: later lines are gone from metrics.jsonl and from the history."""
        self._release()
        self._metrics.close()
        self._saved = {saved: path for saved, path in self._saved.items() if saved <= step}
        self.step = step
        self.tokens = self._open_at(step)

    def flush(self) -> None:
        """metrics.jsonl and events.jsonl hold everything so far, durably; trainer_state.json is up to date."""
        self._release()
        self._write(self._metrics.sync)
        self._write(self._events.sync)
        try:
            write_whole(self._folder.trainer_state, self._state())
        except OSError as fault:
            if not self._warned:
                self._warned.add("state")
                self.warn(f"trainer_state.json cannot be written ({fault.strerror}). Training goes on.")

    def warn(self, text: str) -> None:
        """Said on the log and kept among the events."""
        self.event("warning", {"cause": text})
        log.logger.warning(text)

    def close(self) -> None:
        """Everything is written; nothing more is."""
        self.flush()
        self._metrics.close()
        self._events.close()

    @property
    def last_checkpoint(self) -> str | None:
        """Where the newest checkpoint lies."""
        return self._saved[max(self._saved)] if self._saved else None

    def _open_at(self, step: int) -> int:
        """metrics.jsonl ends at the step, and the history is that of its lines; gives the tokens read up to there."""
        jsonl.cut(self._folder.metrics, step)
        self.history = History(
            logging_steps=self._logging_steps, times_read=self._plan.times_read, epochs=self._plan.epochs
        )
        tokens = last = 0

        def known() -> Iterator[dict[str, Any]]:
            nonlocal tokens, last
            for each in jsonl.lines(self._folder.metrics):
                tokens, last = each.get("tokens", tokens), each["step"]
                yield each

        self.history.replay(known())
        if last != step:
            cause = f"metrics.jsonl ends at step {last}, but the run goes on from step {step}."
            self.event("gap", {"cause": cause})
        self._metrics = jsonl.Lines(self._folder.metrics)
        return tokens

    def _may_be_evaluated(self) -> bool:
        """Whether an evaluation may still come to this step: at its turn, before a save, and at the end."""
        plan = self._plan
        if plan.eval_steps is None:
            return False
        turns = (plan.eval_steps, plan.save_steps or 0)
        return self.step >= plan.total_steps or any(turn and self.step % turn == 0 for turn in turns)

    def _release(self) -> None:
        if self._held is not None:
            held, self._held = self._held, None
            self._write(lambda: self._metrics.add(held))

    def _write(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as fault:
            if self.full is None:
                self.full = (
                    f"The run's files in {self._folder.root} cannot be written any more ({fault.strerror}): "
                    "make room, then run the same command to go on."
                )

    def _state(self) -> bytes:
        plan = self._plan
        return self.history.trainer_state(
            step=self.step,
            total_steps=plan.total_steps,
            tokens=self.tokens,
            flops=self.tokens * (plan.flops_per_token or 0.0),
            eval_steps=plan.eval_steps,
            save_steps=plan.save_steps,
            micro_batch_size=plan.micro_batch_size,
            best_checkpoint=self._saved.get(self.history.best_step or -1),
        )
