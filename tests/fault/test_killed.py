"""Runs killed with SIGKILL at random moments of real saves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shared import ROOT


@pytest.mark.parametrize(("world", "trials"), [(1, 30), (2, 12)])
def test_a_kill_at_any_moment_loses_nothing_that_was_told_to_be_safe(tmp_path: Path, world: int, trials: int) -> None:
    seed = 20 + world
    command = [sys.executable, "-m", "tests.fault.killed", str(tmp_path / "c"), str(seed), str(trials), str(world)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    print(f"seed {seed}, {world} ranks: {result}")
    assert result["skipped"] == 0  # what is not whole never has a checkpoint's name
    assert result["last"] > 2 + trials // 6  # runs did get on
    assert result["cut_off"] > trials // 6  # and many were hit in the middle of a save
