"""The hook as a run uses it: the files that a whole run leaves, also after it was broken off."""

from __future__ import annotations

import errno
import io
import json
import logging
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from danlu.core import log
from danlu.core.contracts import Signal
from danlu.core.errors import InputError
from danlu.core.paths import RunFolder
from danlu.core.world import World
from danlu.monitor import watch as watching
from danlu.monitor.books import Plan
from danlu.monitor.settings import Monitor
from danlu.monitor.watch import Watch, watch
from tests.unit.monitor.reports import Clock, report

CPU = torch.device("cpu")
QUIET = {"tensorboard": False, "curve": False}


@pytest.fixture
def said(caplog, monkeypatch):
    """What was said on the log."""
    monkeypatch.setattr(log.logger, "propagate", True)
    caplog.set_level(logging.INFO, logger="danlu")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "danlu"]


def start(folder: Path, *, world: World | None = None, stream=None, clock=None, plan=None, **settings: object):
    return watch(
        Monitor(**(QUIET | settings)),  # type: ignore[arg-type]
        RunFolder(folder),
        Plan(**({"total_steps": 300} | (plan or {}))),
        world=world or World(),
        device=CPU,
        stream=stream or io.StringIO(),
        clock=clock or time.monotonic,
    )


def lines(path: Path) -> list[dict]:
    refuse = lambda name: pytest.fail(f"{name} is no number")  # noqa: E731
    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def loss_at(step: int) -> float:
    return 2 + math.exp(-step / 50)


def go(
    hook, steps: range, *, eval_steps: int = 10, save_steps: int = 25, bad: tuple[int, ...] = (), clock=None
) -> None:
    """The loop as train/loop runs it: step, hook, evaluation, save."""
    for step in steps:
        if clock:
            clock.pass_by(0.1)
        hook(report(step, loss=math.nan if step in bad else loss_at(step), tokens=100))
        if step % eval_steps == 0:
            with hook.pause("evaluate"):
                hook.evaluated(step, loss_at(step) + 0.5)
        if step % save_steps == 0:
            with hook.pause("save"):
                pass
            hook.event("saved", path=f"checkpoints/step-{step:06d}")


def test_a_run_leaves_its_files(tmp_path):
    hook = start(tmp_path, plan={"total_steps": 50, "eval_steps": 10, "save_steps": 25}, tensorboard=True, curve=True)
    hook.event("started")
    go(hook, range(1, 51))
    summary = hook.close()
    assert hook.close() == summary
    metrics = lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, 51))
    assert [line["loss"] for line in metrics] == pytest.approx([loss_at(step) for step in range(1, 51)])
    assert {line["step"]: line["eval_loss"] for line in metrics if "eval_loss" in line} == {
        step: pytest.approx(loss_at(step) + 0.5) for step in (10, 20, 30, 40, 50)
    }
    assert [line["tokens"] for line in metrics] == [100 * step for step in range(1, 51)]
    events = lines(tmp_path / "events.jsonl")
    assert [event["event"] for event in events if event["event"] != "evaluated"] == ["started", "saved", "saved"]
    assert [event["step"] for event in events if event["event"] == "saved"] == [25, 50]
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    assert (state["global_step"], state["best_global_step"]) == (50, 50)
    assert state["best_model_checkpoint"] == "checkpoints/step-000050"
    assert state["num_input_tokens_seen"] == 5000
    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))
    assert (summary["steps"], summary["tokens"], summary["best_step"]) == (50, 5000, 50)
    assert not list(tmp_path.glob(".*.part"))


@pytest.mark.parametrize("killed_at", [33, 30, 26])
def test_a_run_broken_off_and_gone_on_with_has_each_step_once(tmp_path, killed_at):
    plan = {"total_steps": 60, "eval_steps": 10, "save_steps": 25}
    whole = start(tmp_path / "whole", plan=plan, clock=(clock := Clock()))
    go(whole, range(1, 61), clock=clock)
    whole.close()
    first = start(tmp_path / "broken", plan=plan, clock=(clock := Clock()))
    go(first, range(1, killed_at + 1), clock=clock)  # and no close: it was killed
    with open(tmp_path / "broken" / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 99, "lo')
    second = start(tmp_path / "broken", plan=plan | {"start_step": 25}, clock=(clock := Clock()))
    go(second, range(26, 61), clock=clock)
    second.close()
    settled = lambda folder: [  # noqa: E731
        {name: value for name, value in line.items() if name != "tokens_per_second"}
        for line in lines(tmp_path / folder / "metrics.jsonl")
    ]
    assert settled("broken") == settled("whole")
    states = [json.loads((tmp_path / folder / "trainer_state.json").read_text()) for folder in ("broken", "whole")]
    assert states[0]["log_history"] == states[1]["log_history"]
    assert states[0]["num_input_tokens_seen"] == states[1]["num_input_tokens_seen"] == 6000


def test_what_a_checkpoint_has_is_on_file_before_it_is_made(tmp_path):
    hook = start(tmp_path, plan={"total_steps": 60, "eval_steps": 1})  # so that the last line is always held
    hook(report(1))
    assert lines(tmp_path / "metrics.jsonl") == []
    with hook.pause("save"):
        assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1]
    hook.close()


def test_a_line_is_on_file_at_once_where_no_evaluation_can_come(tmp_path):
    hook = start(tmp_path, plan={"total_steps": 12, "eval_steps": 10, "save_steps": 4})
    written = {}
    for step in range(1, 13):
        hook(report(step))
        written[step] = len(lines(tmp_path / "metrics.jsonl"))
    assert [step for step, count in written.items() if count < step] == [4, 8, 10, 12]
    hook.close()
    assert len(lines(tmp_path / "metrics.jsonl")) == 12
    never = start(tmp_path / "never", plan={"total_steps": 2})
    never(report(1))
    never(report(2))
    assert len(lines(tmp_path / "never" / "metrics.jsonl")) == 2
    never.close()


def test_an_evaluation_before_a_save_stands_in_its_line(tmp_path):
    hook = start(tmp_path, plan={"total_steps": 60, "eval_steps": 50, "save_steps": 7})
    go(hook, range(1, 15), eval_steps=7, save_steps=7)
    hook.close()
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl") if "eval_loss" in line] == [7, 14]


def test_after_a_resume_the_checkpoints_of_before_are_known(tmp_path):
    first = start(tmp_path, plan={"total_steps": 60, "eval_steps": 10, "save_steps": 10})
    go(first, range(1, 31), save_steps=10)
    second = start(tmp_path, plan={"total_steps": 60, "eval_steps": 10, "start_step": 20}, max_unsound_steps=1)
    second(report(21, loss=math.nan))
    assert "the last good checkpoint is checkpoints/step-000020" in second.cause
    second.close()
    assert (
        json.loads((tmp_path / "trainer_state.json").read_text())["best_model_checkpoint"] == "checkpoints/step-000020"
    )


def test_a_step_that_is_not_finite_stands_in_every_record(tmp_path, said):
    # PB-053: step 5, a point every 10.
    out = io.StringIO()
    hook = start(tmp_path, stream=out, logging_steps=10, plan={"total_steps": 10})
    go(hook, range(1, 11), bad=(5,))
    hook.close()
    metrics = lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in metrics if not line["sound"]] == [5]
    assert "loss" not in metrics[4]
    (event,) = [event for event in lines(tmp_path / "events.jsonl") if event["event"] == "skipped"]
    assert (event["step"], event["samples"]) == (5, ["a:0", "a:1"])
    assert "not a number" in event["cause"]
    assert any("Step 5 was skipped" in text for text in said())
    assert "(mean of 9 steps)  1 not finite, skipped" in out.getvalue().splitlines()[-2]
    (point,) = [p for p in json.loads((tmp_path / "trainer_state.json").read_text())["log_history"] if "loss" in p]
    assert (point["steps_in_mean"], point["unsound_steps"]) == (9, 1)


def test_skipping_for_ever_stops_and_names_the_last_good_checkpoint(tmp_path, said):
    # PB-056
    hook = start(tmp_path)
    hook.event("saved", step=4, path="checkpoints/step-000004")
    answers = {step: hook(report(step, loss=math.nan if step >= 5 else 2.0)) for step in range(1, 15)}
    assert [step for step, answer in answers.items() if answer is Signal.STOP] == [14]
    assert "checkpoints/step-000004" in hook.cause
    hook.close()
    told = [text for text in said() if "was skipped" in text]
    assert len(told) == 5  # the rest stands in events.jsonl
    assert "events.jsonl" in told[-1]
    assert len([e for e in lines(tmp_path / "events.jsonl") if e["event"] == "skipped"]) == 10


def test_every_rank_answers_as_the_first_and_only_the_first_writes(tmp_path):
    first = start(tmp_path / "first", world=World(rank=0, size=2))
    other = start(tmp_path / "other", world=World(rank=1, size=2))
    for step in range(1, 15):
        one = report(step, loss=math.nan if step > 3 else 2.0)
        assert first(one) == other(one)
    assert first(report(15, loss=math.nan)) == other(report(15, loss=math.nan)) == Signal.STOP
    assert other.cause is not None
    with other.pause("save"):
        other.flush()
    other.event("saved", path="x")
    other.evaluated(15, 1.0)
    assert other.close() == {}
    first.close()
    assert not (tmp_path / "other").exists()


def test_trackers_that_fail_or_hang_neither_stop_nor_slow_a_step(tmp_path, monkeypatch, said):
    # PB-102
    class Board:
        def __init__(self, folder, *, start_step):
            self.calls = 0

        def take(self, message):
            self.calls += 1
            if self.calls == 3:
                raise ConnectionError("away")

        def close(self):
            pass

    class Hung:
        def take(self, message):
            time.sleep(60)

        def close(self):
            pass

    monkeypatch.setattr(watching, "TensorBoard", Board)
    monkeypatch.setattr(watching, "open_console", lambda stream, *, clock: Hung())
    monkeypatch.setattr(watching.Queue.close, "__kwdefaults__", {"timeout": 0.2})
    hook = start(tmp_path, tensorboard=True, plan={"total_steps": 1000})
    slowest = 0.0
    for step in range(1, 201):
        one = report(step)
        begun = time.thread_time()
        assert hook(one) is Signal.GO
        slowest = max(slowest, time.thread_time() - begun)
        time.sleep(0.0005)
    hook.close()
    assert slowest < 0.05
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == list(range(1, 201))
    assert len([text for text in said() if "TensorBoard failed" in text]) == 1
    causes = [event["cause"] for event in lines(tmp_path / "events.jsonl") if event["event"] == "warning"]
    assert len([cause for cause in causes if "console" in cause]) == 1


def test_speed_and_time_left_after_a_resume_are_right_and_shown(tmp_path):
    # PB-101
    start(tmp_path, plan={"total_steps": 1000}).close()
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 128, "tokens": 12800, "sound": true, "loss": 3.0, "grad_norm": 1.0}\n'
    )
    clock, out = Clock(), io.StringIO()
    hook = start(tmp_path, clock=clock, stream=out, plan={"total_steps": 1000, "start_step": 128})
    clock.pass_by(300)
    for step in range(129, 139):
        clock.pass_by(4.0 if step == 129 else 0.5)
        hook(report(step, tokens=100, seconds=0.5))
    hook.close()
    last = lines(tmp_path / "metrics.jsonl")[-1]
    assert last["tokens_per_second"] == pytest.approx(200, rel=0.2)
    assert last["tokens"] == 12800 + 10 * 100
    shown = out.getvalue().splitlines()[-1]
    assert shown.startswith("step 138/1000 ")
    assert "200 tokens/s" in shown
    assert "left 7:11" in shown  # 862 updates at 0.5 s


def test_a_gap_between_checkpoint_and_metrics_is_told(tmp_path):
    start(tmp_path, plan={"start_step": 7}).close()
    (gap,) = [event for event in lines(tmp_path / "events.jsonl") if event["event"] == "gap"]
    assert "step 0" in gap["cause"]
    assert "step 7" in gap["cause"]


def test_a_full_disk_stops_the_run_with_the_cause(tmp_path, monkeypatch):
    hook = start(tmp_path, plan={"total_steps": 60, "eval_steps": 50})
    assert hook(report(1)) is Signal.GO

    def full(facts):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hook.books._metrics, "add", full)
    assert hook(report(2)) is Signal.STOP
    assert "No space left on device" in hook.cause
    assert "same command" in hook.cause
    hook.close()


def test_waiting_for_data_is_said_once(tmp_path, said):
    clock = Clock()
    hook = start(tmp_path, clock=clock, plan={"workers": 1, "prefetch": 2})
    for step in range(1, 100):
        clock.pass_by(1.0)
        hook(report(step, seconds=1.0, data_seconds=0.5))
    hook.close()
    assert len([text for text in said() if "waited for data" in text]) == 1
    assert [event["step"] for event in lines(tmp_path / "events.jsonl") if event["event"] == "data_wait"] == [22]


def test_mfu_is_against_all_ranks_peaks(tmp_path, monkeypatch):
    monkeypatch.setattr(watching.devices, "peak_flops", lambda device, dtype: 1e6)
    clock = Clock()
    hook = start(
        tmp_path, world=World(rank=0, size=4), clock=clock, plan={"flops_per_token": 1000.0, "total_steps": 100}
    )
    for step in range(1, 30):
        clock.pass_by(0.1)
        hook(report(step, tokens=100))
    hook.close()
    last = lines(tmp_path / "metrics.jsonl")[-1]
    assert last["tokens_per_second"] == pytest.approx(1000)
    assert last["mfu"] == pytest.approx(1000 * 1000 / 4e6)


def test_the_curve_is_drawn_for_the_end(tmp_path):
    hook = start(tmp_path, stream=io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    go(hook, range(1, 101))
    drawn = hook.curve(width=60)
    hook.close()
    assert "●" in drawn
    assert max(map(len, drawn.splitlines())) <= 60
    plain = start(tmp_path / "ascii", stream=io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    go(plain, range(1, 101))
    assert plain.curve().isascii()
    plain.close()


def test_what_is_not_built_is_refused():
    for asked in ({"wandb": True},):
        with pytest.raises(InputError, match="not built yet"):
            Monitor(**asked)  # type: ignore[arg-type]


def test_the_hook_costs_little(tmp_path):
    # The bound is for a busy machine: alone the hook takes a fraction of a millisecond.
    hook = start(tmp_path, plan={"eval_steps": 100}, stream=io.StringIO())
    assert isinstance(hook, Watch)
    times = []
    for step in range(1, 201):
        one = report(step)
        begun = time.thread_time()
        hook(one)
        times.append(time.thread_time() - begun)
    hook.close()
    assert sorted(times)[100] < 2e-3


def test_where_a_run_ends_early_its_last_step_is_shown(tmp_path):
    out = io.StringIO()
    hook = start(tmp_path, stream=out, clock=Clock())
    for step in range(1, 6):
        hook(report(step))
    hook.close()
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["1/300", "5/300"]


BACK = {
    "checkpoint": "from before it",
    "number": 1,
    "from": 37,
    "to": 25,
    "cause": "It diverges.",
    "likely": "rate too high",
    "samples": ["a:0:1"],
}


def test_a_run_that_went_back_has_each_step_once_and_nothing_is_lost(tmp_path, said):
    plan = {"total_steps": 60, "eval_steps": 10, "save_steps": 25}
    whole = start(tmp_path / "whole", plan=plan, clock=(clock := Clock()))
    go(whole, range(1, 61), clock=clock)
    whole.close()
    hook = start(tmp_path / "back", plan=plan, clock=(clock := Clock()), tensorboard=True, curve=True)
    go(hook, range(1, 38), clock=clock)
    hook.set_aside("001-step-000037-to-000025.jsonl", after=25)
    hook.went_back(25, BACK)
    go(hook, range(26, 61), clock=clock)
    hook.remember(BACK)  # as a run does that is gone on with
    summary = hook.close()
    timeless = lambda line: {name: value for name, value in line.items() if name != "tokens_per_second"}  # noqa: E731
    both = [list(map(timeless, lines(tmp_path / name / "metrics.jsonl"))) for name in ("back", "whole")]
    assert both[0] == both[1]
    states = [json.loads((tmp_path / name / "trainer_state.json").read_text()) for name in ("back", "whole")]
    assert states[0]["log_history"] == states[1]["log_history"]
    assert states[0]["num_input_tokens_seen"] == states[1]["num_input_tokens_seen"] == 6000
    [aside] = (tmp_path / "back" / "rolled-back").iterdir()
    assert aside.name == "001-step-000037-to-000025.jsonl"
    assert [line["step"] for line in lines(aside)] == list(range(26, 38))
    [event] = [event for event in lines(tmp_path / "back" / "events.jsonl") if event["event"] == "rolled_back"]
    assert event["step"] == 25 and {name: event[name] for name in BACK} == BACK
    assert any(text.startswith("Went back from step 37 to step 25") and "rate too high" in text for text in said())
    assert summary["steps"] == 72


def test_that_it_went_back_is_said_at_the_next_start_if_it_was_killed_just_then(tmp_path):
    first = start(tmp_path, plan={"total_steps": 60, "save_steps": 25})
    go(first, range(1, 38))
    first.set_aside("001-step-000037-to-000025.jsonl", after=25)  # and it was killed
    second = start(tmp_path, plan={"total_steps": 60, "save_steps": 25, "start_step": 25})
    second.remember(BACK)
    second.remember(BACK)
    second.close()
    third = start(tmp_path, plan={"total_steps": 60, "save_steps": 25, "start_step": 25})
    third.remember(BACK)
    third.close()
    assert [event["event"] for event in lines(tmp_path / "events.jsonl")].count("rolled_back") == 1


def test_a_spike_is_no_unsound_number_and_both_ranks_agree_on_it(tmp_path):
    first, other = start(tmp_path), start(tmp_path, world=World(rank=1, size=2))
    for step in range(1, 41):
        made = report(step, loss=2.0 + 0.01 * (step % 5))
        assert first(made) is other(made) is Signal.GO
        assert first.health.limits == other.health.limits
    for step in (41, 42, 43):
        made = replace(report(step, loss=99.0), sound=False)
        answers = first(made), other(made)
    assert answers == (Signal.ROLLBACK, Signal.ROLLBACK)
    assert first.health.trouble == other.health.trouble and first.health.state() == other.health.state()
    assert first.health.unsound_in_all == 0
    assert lines(tmp_path / "metrics.jsonl")[-1]["loss"] == 99.0
    first.close()


def test_norms_of_layers_stand_in_the_line_of_their_step(tmp_path):
    hook = start(tmp_path, plan={"total_steps": 5})
    hook(report(1))
    hook(replace(report(2), extra={"grad_norm/blocks.0": 0.25, "weight_norm/blocks.0": 4.0}))
    hook.close()
    assert lines(tmp_path / "metrics.jsonl")[1]["grad_norm/blocks.0"] == 0.25
    assert "grad_norm/blocks.0" not in lines(tmp_path / "metrics.jsonl")[0]
