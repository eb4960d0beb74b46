"""When a run is stopped for its health, and what is said."""

from __future__ import annotations

import json
import math
from dataclasses import replace

from danlu.core.contracts import Signal
from danlu.monitor.causes import REMEDIES, Likely
from danlu.monitor.health import Health
from danlu.monitor.reading import read
from tests.unit.monitor.reports import report


def health(**changes: int) -> Health:
    return Health(**({"max_unsound": 3, "max_unlabelled": 3, "total_steps": 1000} | changes))


def test_skipping_for_ever_ends_with_the_cause_and_the_last_good_checkpoint():
    # PB-056
    guard = health()
    signals = []
    for step in range(1, 9):
        loss = math.nan if step >= 5 else 2.0
        signals.append(guard.look(read(report(step, loss=loss)), last_checkpoint="checkpoints/step-000004")[0])
        if signals[-1] is Signal.STOP:
            break
    assert signals == [Signal.GO] * 6 + [Signal.STOP]
    assert guard.cause is not None
    for part in ("step 7", "3 updates in a row", "not a number", "checkpoints/step-000004", "max_unsound_steps is 3"):
        assert part in guard.cause


def test_a_checkpoint_that_is_not_known_of_is_not_spoken_of():
    guard = health(max_unsound=1)
    assert guard.look(read(report(1, loss=math.nan)))[0] is Signal.STOP
    assert "(monitor.max_unsound_steps is 1). A lower" in (guard.cause or "")


def test_single_bad_steps_are_told_and_never_stop_a_run():
    guard = health()
    told = []
    for step in range(1, 100):
        signal, findings = guard.look(read(report(step, norm=math.inf if step % 3 else 1.0)))
        assert signal is Signal.GO
        told += findings
    assert len(told) == guard.unsound_in_all == 66
    assert told[0].kind == "skipped"
    assert "gradient norm was infinite" in told[0].cause


def test_no_label_at_all_stops_with_the_cause():
    guard = health()
    answers = [guard.look(read(report(step, labels=0, loss=0.0, norm=0.0))) for step in (1, 2, 3)]
    assert [signal for signal, _ in answers] == [Signal.GO, Signal.GO, Signal.STOP]
    assert answers[0][1][0].kind == "unlabelled"
    assert "no label" in (guard.cause or "")


def test_a_short_run_without_labels_stops_too():
    guard = health(total_steps=1)
    assert guard.look(read(report(1, labels=0)))[0] is Signal.STOP


def test_now_and_then_a_step_without_labels_is_no_illness():
    guard = health()
    for step in range(1, 60):
        assert guard.look(read(report(step, labels=0 if step % 3 else 64)))[0] is Signal.GO


def test_a_gradient_that_is_nothing_is_told_once_and_a_small_one_is_not():
    guard = health()
    told = []
    for step in range(1, 40):
        told += guard.look(read(report(step, norm=0.0)))[1]
    assert [finding.kind for finding in told] == ["still"]
    assert "10 updates" in told[0].cause
    quiet = health()
    assert not any(quiet.look(read(report(step, norm=1e-20)))[1] for step in range(1, 40))


def test_gone_on_from_its_state_it_stops_where_it_would_have_stopped():
    first, second = health(), health()
    assert all(first.look(read(report(step, loss=math.nan)))[0] is Signal.GO for step in (1, 2))
    second.restore(json.loads(json.dumps(first.state())))
    assert second.look(read(report(3, loss=math.nan)))[0] is Signal.STOP and second.unsound_in_all == 3
    fresh = health()
    fresh.restore(None)
    assert fresh.look(read(report(3, loss=math.nan)))[0] is Signal.GO


def test_each_stop_names_its_likely_cause():
    labels, numbers, overflow = health(max_unlabelled=1), health(max_unsound=1), health(max_unsound=1)
    labels.look(read(report(1, labels=0, loss=0.0, norm=0.0)))
    numbers.look(read(report(1, loss=math.nan)))
    overflow.look(read(replace(report(1, norm=math.inf), extra={"loss_scale": 1.0})))
    assert (labels.likely, numbers.likely, overflow.likely) == (Likely.LABELS, Likely.UNKNOWN, Likely.OVERFLOW)
    for each in (labels, numbers, overflow):
        assert each.cause is not None and each.likely is not None and each.cause.endswith(REMEDIES[each.likely])
