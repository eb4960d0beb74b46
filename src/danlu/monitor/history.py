"""The run's points so far, and trainer_state.json: Hugging Face's shape, for the tools that read it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from danlu.monitor.sinks import Curve

MOST = 4096  # training points kept; beyond, every second one goes


class Interval:
    """The steps since the last point: means over those whose numbers were finite, and how many there were."""

    def __init__(self) -> None:
        self.clear()

    def add(self, *, loss: float | None, losses: dict[str, float], norm: float | None) -> None:
        """One more step; an unsound one has no loss and is only counted."""
        if loss is None or norm is None:
            self.unsound += 1
            return
        self.averaged += 1
        self._loss += loss
        self._norm += norm
        for name, value in losses.items():
            self._losses[name] = self._losses.get(name, 0.0) + value

    @property
    def loss(self) -> float | None:
        return self._loss / self.averaged if self.averaged else None

    @property
    def norm(self) -> float | None:
        return self._norm / self.averaged if self.averaged else None

    @property
    def losses(self) -> dict[str, float]:
        return {name: value / self.averaged for name, value in self._losses.items()} if self.averaged else {}

    def clear(self) -> None:
        """Empty."""
        self.averaged = self.unsound = 0
        self._loss = self._norm = 0.0
        self._losses: dict[str, float] = {}


@dataclass(slots=True)
class History:
    """What a whole run came to, from its first step: points at each logging step, and each evaluation.

    Long runs are thinned: beyond ``MOST`` points every second one goes, and from then on every second one is kept.
    """

    logging_steps: int = 1
    times_read: Callable[[int], float] | None = None
    epochs: float | None = None
    train: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    best: float | None = None
    best_step: int | None = None
    interval: Interval = field(default_factory=Interval)
    _stride: int = 1

    def replay(self, lines: Iterable[dict[str, Any]]) -> None:
        """As if the steps that metrics.jsonl holds had just been seen."""
        for line in lines:
            self.seen(
                step=line["step"],
                loss=line.get("loss") if line.get("sound", True) else None,
                losses={},
                norm=line.get("grad_norm"),
                learning_rate=line.get("learning_rate", 0.0),
            )
            if "eval_loss" in line:
                self.evaluated(line["step"], line["eval_loss"])

    def seen(
        self, *, step: int, loss: float | None, losses: dict[str, float], norm: float | None, learning_rate: float
    ) -> bool:
        """One more step, sound or not (then without a loss). Whether it ends a logging interval."""
        if step % self.logging_steps == 1 or self.logging_steps == 1:
            self.interval.clear()
        self.interval.add(loss=loss, losses=losses, norm=norm)
        if step % self.logging_steps:
            return False
        if step % (self.logging_steps * self._stride) == 0:
            point: dict[str, Any] = {"step": step, "learning_rate": learning_rate}
            point |= {"epoch": self.epoch(step)} if self.times_read else {}
            if self.interval.loss is not None:
                point |= {"loss": self.interval.loss, "grad_norm": self.interval.norm}
            if self.interval.unsound or self.logging_steps > 1:
                point |= {"steps_in_mean": self.interval.averaged, "unsound_steps": self.interval.unsound}
            self.train.append(point)
            if len(self.train) > MOST:
                self._stride *= 2
                self.train = [p for p in self.train if p["step"] % (self.logging_steps * self._stride) == 0]
        return True

    def evaluated(self, step: int, loss: float) -> bool:
        """One more evaluation. Whether it is the best so far; one that is not finite never is, and has no point.

        Made again at the same step, it takes the place of the one before."""
        if not math.isfinite(loss):
            return False
        point: dict[str, Any] = {"step": step, "eval_loss": loss}
        if self.evaluations and self.evaluations[-1]["step"] == step:
            self.evaluations.pop()
        self.evaluations.append(point | ({"epoch": self.epoch(step)} if self.times_read else {}))
        if self.best is None or loss < self.best:
            self.best, self.best_step = loss, step
            return True
        return False

    def epoch(self, step: int) -> float:
        """How many times the data has been seen at this step; padding that fills the last batch is none of it."""
        times = self.times_read(step) if self.times_read else 0.0
        return times if self.epochs is None else min(times, self.epochs)

    def curve(self) -> Curve:
        """The points to draw."""
        return Curve(
            train=tuple((p["step"], p["loss"]) for p in self.train if "loss" in p),
            evaluation=tuple((p["step"], p["eval_loss"]) for p in self.evaluations),
            learning_rate=tuple((p["step"], p["learning_rate"]) for p in self.train),
        )

    def trainer_state(
        self,
        *,
        step: int,
        total_steps: int,
        tokens: int,
        flops: float,
        eval_steps: int | None,
        save_steps: int | None,
        micro_batch_size: int | None,
        best_checkpoint: str | None,
    ) -> bytes:
        """The content of trainer_state.json: exactly the fields of ``transformers.TrainerState``."""
        entries = sorted([*self.train, *self.evaluations], key=lambda point: point["step"])
        epochs = self.epoch(total_steps)
        state: dict[str, Any] = {
            "best_global_step": self.best_step,
            "best_metric": self.best,
            "best_model_checkpoint": best_checkpoint,
            "epoch": self.epoch(step),
            "eval_steps": eval_steps or 0,
            "global_step": step,
            "is_hyper_param_search": False,
            "is_local_process_zero": True,
            "is_world_process_zero": True,
            "log_history": entries,
            "logging_steps": self.logging_steps,
            "max_steps": total_steps,
            "num_input_tokens_seen": tokens,
            "num_train_epochs": math.ceil(epochs),
            "save_steps": save_steps or 0,
            "stateful_callbacks": {},
            "total_flos": flops,
            "train_batch_size": micro_batch_size,
            "trial_name": None,
            "trial_params": None,
        }
        return (json.dumps(state, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()
