"""The points of a run, and the file that Hugging Face's tools read."""

from __future__ import annotations

import json
import math
import statistics
from itertools import pairwise

import pytest

from danlu.monitor.history import MOST, History


def see(history: History, steps: range, *, bad: tuple[int, ...] = ()) -> None:
    for step in steps:
        loss = None if step in bad else 5.0 - step / 100
        history.seen(
            step=step,
            loss=loss,
            losses={"language": loss or 0.0},
            norm=float(step) if loss else None,
            learning_rate=1e-3,
        )


def state(history: History, **changes: object) -> bytes:
    facts = {
        "step": 60,
        "total_steps": 100,
        "tokens": 6000,
        "flops": 1e9,
        "eval_steps": 20,
        "save_steps": 50,
        "micro_batch_size": 4,
        "best_checkpoint": "runs/x/checkpoints/step-000040",
    }
    return history.trainer_state(**(facts | changes))  # type: ignore[arg-type]


def test_transformers_opens_the_file(tmp_path):
    transformers = pytest.importorskip("transformers", reason="the tool whose file this is")
    history = History(logging_steps=10, times_read=lambda step: step / 25)
    see(history, range(1, 41))
    assert history.evaluated(20, 3.5)
    assert history.evaluated(40, 3.25)
    see(history, range(41, 61))
    assert not history.evaluated(60, 3.4)
    path = tmp_path / "trainer_state.json"
    path.write_bytes(state(history))
    opened = transformers.TrainerState.load_from_json(str(path))
    assert (opened.global_step, opened.max_steps, opened.epoch) == (60, 100, 60 / 25)
    assert (opened.best_metric, opened.best_global_step) == (3.25, 40)
    assert opened.best_model_checkpoint == "runs/x/checkpoints/step-000040"
    assert opened.num_train_epochs == 4
    assert (opened.logging_steps, opened.eval_steps, opened.save_steps) == (10, 20, 50)
    assert [entry["step"] for entry in opened.log_history] == [10, 20, 20, 30, 40, 40, 50, 60, 60]
    first, _, evaluation = opened.log_history[:3]
    assert {"loss", "learning_rate", "grad_norm", "step", "epoch"} <= set(first)
    assert first["loss"] == pytest.approx(statistics.mean(5 - step / 100 for step in range(1, 11)))
    assert first["grad_norm"] == pytest.approx(5.5)
    assert evaluation == {"step": 20, "eval_loss": 3.5, "epoch": 0.8}
    # and writes the same back
    opened.save_to_json(str(tmp_path / "again.json"))
    assert json.loads((tmp_path / "again.json").read_text()) == json.loads(path.read_text())


def test_a_mean_says_over_how_many_steps_it_is_taken():
    # PB-053: step 5 is not finite, a point every 10.
    history = History(logging_steps=10)
    see(history, range(1, 11), bad=(5,))
    (point,) = history.train
    assert point["steps_in_mean"] == 9
    assert point["unsound_steps"] == 1
    assert point["loss"] == pytest.approx(statistics.mean(5 - step / 100 for step in range(1, 11) if step != 5))


def test_an_interval_without_one_finite_step_has_no_loss_but_is_there():
    history = History()
    see(history, range(1, 4), bad=(2,))
    assert [("loss" in point, point.get("unsound_steps", 0)) for point in history.train] == [
        (True, 0),
        (False, 1),
        (True, 0),
    ]
    assert [step for step, _ in history.curve().train] == [1, 3]
    json.loads(state(history), parse_constant=lambda name: pytest.fail(f"{name} is no number"))


def test_a_long_run_is_thinned_to_a_bound_evenly_and_evaluations_are_kept():
    history = History()
    for step in range(1, 5 * MOST + 1):
        see(history, range(step, step + 1))
        if step % 1000 == 0:
            history.evaluated(step, 3.0)
    steps = [point["step"] for point in history.train]
    assert MOST // 2 <= len(steps) <= MOST
    assert {b - a for a, b in pairwise(steps)} == {8}
    assert len(history.evaluations) == 5 * MOST // 1000


def test_a_resumed_history_is_the_one_that_was_never_broken():
    lines = []
    whole, first, second = (History(logging_steps=7) for _ in range(3))
    for step in range(1, 51):
        sound = step != 12
        line = {"step": step, "learning_rate": 1e-3, "sound": sound}
        if sound:
            line |= {"loss": 4 - step / 50, "grad_norm": 1 + step / 10}
        if step % 20 == 0:
            line["eval_loss"] = 4 - step / 40
        lines.append(line)
    whole.replay(lines)
    first.replay(lines[:30])
    second.replay(lines[:30])
    second.replay(lines[30:])
    assert state(second) == state(whole) != state(first)


def test_an_evaluation_that_is_no_number_is_never_the_best():
    history = History()
    assert not history.evaluated(10, math.nan)
    assert history.best is None
    assert history.evaluated(20, 2.0)
    assert not history.evaluated(30, -math.inf)
    assert (history.best, history.best_step) == (2.0, 20)


@pytest.mark.parametrize(("rows", "epochs"), [(65, 2.0), (64, 2.0), (33, 3.0), (100, 0.5)])
def test_padding_that_fills_the_last_batch_is_no_part_of_an_epoch(rows: int, epochs: float) -> None:
    batch = 32
    updates = -(-int(rows * epochs) // batch)
    history = History(times_read=lambda step: step * batch / rows, epochs=epochs)
    see(history, range(1, updates + 1))
    found = json.loads(state(history, step=updates, total_steps=updates))
    assert found["epoch"] == epochs and found["num_train_epochs"] == math.ceil(epochs)
    assert found["log_history"][0]["epoch"] == pytest.approx(batch / rows)
    assert found["log_history"][-1]["epoch"] == epochs
