"""Which checkpoint a run goes back to, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from danlu.checkpoint.keep import Checkpoint
from danlu.checkpoint.save import Saver
from danlu.monitor.spikes import Trouble
from danlu.train.retreat import last_good, standing
from tests.unit.checkpoint.made import snapshot

ALL = Checkpoint(keep_last=-1, asynchronous=False)
RISE = Trouble(kind="rise", step=80, before=45, cause="It diverges.", loss=9.0, usual=5.0, samples=())


def saved(folder: Path, *steps: int, left: tuple[int, ...] = ()) -> Path:
    saver = Saver(folder, ALL)
    for step in sorted((*steps, *left)):
        saver.save(replace(snapshot(step), due=step not in left))
    return folder


@pytest.mark.parametrize("kind", ["rise", "spikes"])
def test_it_is_the_newest_from_before_but_none_that_the_run_left_with(tmp_path: Path, kind: str) -> None:
    trouble = replace(RISE, kind=kind)
    found = last_good(saved(tmp_path, 30, 40, 50, left=(43, 67)), trouble)
    assert found is not None and found.step == 40
    assert standing(found, trouble) == "from before it"


def test_the_oldest_that_is_kept_is_called_no_more_than_that(tmp_path: Path) -> None:
    saved(tmp_path, 50, 60, left=(47, 67))
    found = last_good(tmp_path, RISE)
    assert found is not None and found.step == 50
    assert standing(found, RISE) == "the oldest that is kept, itself perhaps hurt: the loss was lowest at step 45"
    assert last_good(tmp_path, replace(RISE, kind="spikes")) is None
    assert last_good(saved(tmp_path / "left", left=(40,)), RISE) is None
