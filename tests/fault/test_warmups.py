"""Twenty recorded warm-ups of ten seeds: nothing is told of them; what is put into them is found in all of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import pytest

from danlu.core.contracts import Signal
from danlu.monitor.causes import Finding
from danlu.monitor.health import Health
from danlu.monitor.layers import Layers, Strata
from danlu.monitor.reading import read
from danlu.monitor.spikes import Spikes, Spotter
from danlu.monitor.trend import Trend
from tests.fault import warmups
from tests.fault.warmups import Update
from tests.unit.monitor.reports import report

COURSES = warmups.recorded()


def looked(course: Sequence[Update]) -> tuple[list[tuple[int, Finding]], Health, int]:
    """What is told of a course, up to its end or to the run's first trouble, and at which update that was."""
    settings = Spikes()
    peak = max(update.rate for update in course)
    health = Health(
        max_unsound=10,
        max_unlabelled=3,
        total_steps=len(course),
        spotter=Spotter(settings),
        trend=Trend(rise=settings.rise, plateau=500, peak=peak),
        strata=Strata(Layers()),
    )
    told: list[tuple[int, Finding]] = []
    for step, (loss, norm, rate) in enumerate(course, 1):
        limits = health.limits
        made = report(step, loss=loss, norm=norm, rate=rate)
        signal, findings = health.look(read(replace(made, sound=loss <= limits.loss and norm <= limits.norm)))
        told += [(step, finding) for finding in findings]
        if signal is Signal.ROLLBACK:
            return told, health, step
    return told, health, len(course)


def changed(
    course: Sequence[Update], step: int, *, loss: float | None = None, norm: float | None = None
) -> list[Update]:
    """The course to just after an update whose numbers are so many times the median of those before."""
    found, before = list(course[: step + 2]), course[max(0, step - 24) : step - 1]
    was = found[step - 1]
    found[step - 1] = Update(
        loss=was.loss if loss is None else loss * statistics.median(update.loss for update in before),
        norm=was.norm if norm is None else norm * statistics.median(update.norm for update in before),
        rate=was.rate,
    )
    return found


def test_there_are_ten_seeds_of_each_kind() -> None:
    assert len(COURSES) == 10 * len(warmups.KINDS) and {len(course) for course in COURSES.values()} == {warmups.STEPS}


@pytest.mark.parametrize("name", COURSES)
def test_nothing_is_told_of_a_normal_warm_up(name: str) -> None:
    told, health, _ = looked(COURSES[name])
    assert (told, health.trouble) == ([], None)


@pytest.mark.parametrize("name", COURSES)
@pytest.mark.parametrize("times", [{"loss": 50.0, "norm": 50.0}, {"loss": 50.0}, {"norm": 50.0}])
def test_fifty_times_too_much_is_found_at_any_update(name: str, times: dict[str, float]) -> None:
    for step in (21, 40, 110):
        told, health, _ = looked(changed(COURSES[name], step, **times))
        assert [(at, finding.kind) for at, finding in told] == [(step, "skipped"), (step + 1, "spike_over")]
        assert health.trouble is None


@pytest.mark.parametrize("name", COURSES)
def test_a_slow_divergence_is_found_in_time(name: str) -> None:
    course = COURSES[name]
    grown = [
        Update(loss * math.exp(0.015 * max(0, step - 120)), norm, rate)
        for step, (loss, norm, rate) in enumerate(course, 1)
    ]
    told, health, step = looked(grown)
    assert health.trouble is not None and health.trouble.kind == "rise"
    assert 64 <= health.trouble.before <= 144 and step <= 192
    assert {finding.kind for _, finding in told} <= {"rising"}
