"""The line of metrics.jsonl: golden, byte for byte."""

from __future__ import annotations

import json
import math

import pytest

from danlu.monitor.reading import line, read
from tests.unit.monitor.reports import report

# Written by hand from the contract: which names a line holds, in which order, and that nothing in it is not a number.
GOLDEN = (
    '{"step": 7, "loss": 2.5, "learning_rate": 0.001, "grad_norm": 0.75, "tokens": 448, "tokens_per_second": 640.0, '
    '"step_seconds": 0.1, "data_seconds": 0.0125, "sound": true, "mfu": 0.25, "memory_bytes": 1024, '
    '"loss/language": 2.5}'
)
GOLDEN_UNSOUND = (
    '{"step": 8, "learning_rate": 0.001, "tokens": 512, "step_seconds": 0.1, "data_seconds": 0.0, "sound": false}'
)


def test_a_sound_step():
    facts = line(
        read(report(7, loss=2.5, norm=0.75, data_seconds=0.0125)),
        tokens=448,
        tokens_per_second=640.0,
        mfu=0.25,
        memory=1024,
    )
    assert json.dumps(facts) == GOLDEN


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_step_whose_numbers_are_none_leaves_them_out(bad):
    facts = line(read(report(8, loss=bad, norm=bad)), tokens=512, tokens_per_second=None)
    assert json.dumps(facts, allow_nan=False) == GOLDEN_UNSOUND


def test_a_finite_loss_stays_when_only_the_gradient_is_infinite():
    facts = line(read(report(8, loss=2.0, norm=math.inf)), tokens=1, tokens_per_second=None)
    assert facts["loss"] == 2.0
    assert "grad_norm" not in facts
    assert facts["sound"] is False


def test_several_terms_add_up_to_the_loss_and_stand_by_name():
    reading = read(report(1, language=2.0, router=0.25))
    assert reading.loss == 2.25
    facts = line(reading, tokens=1, tokens_per_second=None)
    assert facts["loss/language"] == 2.0
    assert facts["loss/router"] == 0.25
