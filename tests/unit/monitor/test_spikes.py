"""Which updates are not made, and when the run is in trouble."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from danlu.monitor.causes import Likely
from danlu.monitor.reading import Reading, read
from danlu.monitor.spikes import Spikes, Spotter, Trouble
from tests.unit.monitor.reports import report


def seen(spotter: Spotter, step: int, loss: float = 2.0, norm: float = 1.0, **more: Any) -> tuple[list[str], Any]:
    """The update is made if it holds the limits, as a run does."""
    limits = spotter.limits
    found = read(replace(report(step, loss=loss, norm=norm, **more), sound=loss <= limits.loss and norm <= limits.norm))
    findings, trouble = spotter.see(found)
    return [finding.kind for finding in findings], trouble


def calm(steps: int = 40) -> Spotter:
    spotter = Spotter(Spikes())
    for step in range(1, steps + 1):
        assert seen(spotter, step, loss=2.0 + 0.05 * (step % 3), norm=1.0 + 0.1 * (step % 4)) == ([], None)
    return spotter


def test_a_spike_of_the_loss_or_the_norm_is_skipped_and_told() -> None:
    for wrong in ({"loss": 100.0}, {"norm": 50.0}):
        spotter = calm()
        assert seen(spotter, 41, **wrong) == (["skipped"], None)
        assert seen(spotter, 42) == (["spike_over"], None)
        assert seen(spotter, 43) == ([], None)


def test_what_was_skipped_widens_no_limit() -> None:
    spotter = calm()
    before = spotter.limits
    seen(spotter, 41, loss=1e6, norm=1e6)
    assert spotter.limits == before


def test_three_of_six_are_trouble_and_it_names_what_came_before() -> None:
    spotter = calm()
    assert seen(spotter, 41, loss=100.0, samples=("a:0:1",)) == (["skipped"], None)
    assert seen(spotter, 42)[0] == ["spike_over"]
    assert seen(spotter, 43, loss=100.0, samples=("a:0:3",)) == (["skipped"], None)
    kinds, trouble = seen(spotter, 44, loss=90.0, samples=("a:0:4",))
    assert kinds == ["skipped"]
    assert (trouble.kind, trouble.step, trouble.before, trouble.loss) == ("spikes", 44, 39, 90.0)
    assert 2.0 <= trouble.usual <= 2.1
    assert "a:0:4" in trouble.samples
    assert Trouble.of(json.loads(json.dumps(trouble.state()))) == trouble


def test_spikes_far_apart_are_no_trouble() -> None:
    spotter = calm()
    for step in range(41, 400):
        kinds, trouble = seen(spotter, step, loss=100.0 if step % 8 == 0 else 2.0)
        assert trouble is None
        assert ("skipped" in kinds) is (step % 8 == 0)


def test_the_start_of_a_run_alarms_nobody() -> None:
    spotter = Spotter(Spikes())
    for step in range(1, 20):
        assert seen(spotter, step, loss=1000.0 if step == 10 else 5.0, norm=1e4 if step == 12 else 1.0) == ([], None)


def test_a_number_that_is_not_finite_is_none_of_its_business() -> None:
    spotter = calm()
    assert spotter.see(Reading(replace(report(41), sound=False), float("nan"), {}, {}, 1.0)) == ([], None)
    assert seen(spotter, 42) == ([], None)


def test_gone_on_from_its_state_it_answers_as_if_never_interrupted() -> None:
    course = [(2.0, 1.0)] * 30 + [(90.0, 1.0), (2.1, 60.0), (2.0, 1.0), (2.0, 1.1)] * 6
    for cut in (10, 30, 31, 32, 40):
        whole, first, second = Spotter(Spikes()), Spotter(Spikes()), Spotter(Spikes())
        answers = [seen(whole, step, *pair) for step, pair in enumerate(course, 1)]
        for step, pair in enumerate(course[:cut], 1):
            seen(first, step, *pair)
        second.restore(json.loads(json.dumps(first.state())))
        assert [seen(second, cut + step, *pair) for step, pair in enumerate(course[cut:], 1)] == answers[cut:]
        assert second.state() == whole.state()


def test_who_was_to_blame_is_said_once_the_next_batch_is_usual() -> None:
    spotter = calm()
    seen(spotter, 41, loss=100.0)
    [finding], _ = spotter.see(read(report(42)))
    assert finding.likely is Likely.DATA and "step 41" in finding.cause
