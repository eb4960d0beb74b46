"""A thread that builds batches stays away: said after a time, nothing waits for it, and the same command goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fault import runs
from tests.fault.test_launcher import Job, site, write

STAYS_AWAY = """
    import threading
    from danlu.data import source
    from danlu.data.store import Shards
    source.STUCK_SECONDS, read, calls = 1, Shards.read, []
    def away(*arguments):
        if threading.current_thread().name.startswith("data"):
            calls.append(1)
        if len(calls) > 50:
            threading.Event().wait()
        return read(*arguments)
    Shards.read = away
"""


def test_a_disk_that_does_not_answer_ends_the_run_and_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unhurt, recipe = write(tmp_path / "unhurt"), write(tmp_path / "hurt")
    assert runs.finish(unhurt) == 0, runs.said(unhurt)
    site(recipe, STAYS_AWAY)
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "0")  # for `site`; one process
        job = Job(recipe)  # as a user starts it: how its process ends is looked at
    assert job.end() == 1
    assert "was not there after 1 s: a file of data.train does not answer" in runs.said(recipe).splitlines()[-1]
    assert runs.finish(recipe) == 0, runs.said(recipe)
    assert len(runs.events(recipe, "resumed")) == 1
    runs.same(recipe, unhurt)
