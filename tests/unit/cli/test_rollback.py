"""`danlu rollback`: what it hands on, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from danlu.cli import main as door
from danlu.cli import train
from danlu.train import branch as branching
from tests.fault import runs


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A run's folder of one rank, and what the verb hands on: to the branch, and to training."""
    from danlu.recipe import yaml

    made: dict[str, Any] = {"root": tmp_path / "runs" / "mine"}
    made["root"].mkdir(parents=True)
    yaml.save(yaml.load(str(runs.write_recipe(tmp_path)), ["parallel.shard=1"]), made["root"] / "recipe.yaml")

    def branch(root: Path, *, to: int, overrides: list[str], announce: Any) -> Path:
        made["branch"] = (root, to, overrides)
        return tmp_path / "new" / "recipe.yaml"

    def run(arguments: Any) -> int:
        made["train"] = vars(arguments)
        return 0

    monkeypatch.setattr(branching, "branch", branch)
    monkeypatch.setattr(train, "run", run)
    return made


def test_the_branch_is_made_and_trained(handed: dict[str, Any], tmp_path: Path) -> None:
    root = str(handed["root"])
    assert door.main(["rollback", root, "--to", "100", "optimizer.learning_rate=1e-4", "max_steps=200"]) == 0
    assert handed["branch"] == (Path(root), 100, ["optimizer.learning_rate=1e-4", "max_steps=200"])
    assert handed["train"] | {"recipe": "", "debug": False} == {
        "recipe": "",
        "overrides": [],
        "nproc": 1,
        "restart": False,
        "debug": False,
    }
    assert handed["train"]["recipe"] == str(tmp_path / "new" / "recipe.yaml")


def test_on_another_number_of_processes_the_layout_is_settled_anew(handed: dict[str, Any]) -> None:
    assert door.main(["rollback", str(handed["root"]), "--to", "3", "--nproc", "2"]) == 0
    assert handed["branch"][2] == ["parallel.shard=auto", "batch.micro_batch_size=auto"]
    assert handed["train"]["nproc"] == 2


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert door.main(["rollback", str(tmp_path), "--to", "3"]) == 2
    assert capsys.readouterr().err == f"{tmp_path} is no run's folder: it holds no recipe.yaml\n"


def test_the_step_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        door.main(["rollback", "runs/mine"])
    assert end.value.code == 2 and "--to" in capsys.readouterr().err
