"""`--nproc 2` as a user starts it: a rank that dies or raises, signals, two jobs at once. No process is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fault import runs
from tests.shared import ROOT

STEPS = 12
SITE = """
import os
if int(os.environ.get("RANK", "-1")) >= 0:
    import sys
    sys.path.insert(0, {root!r})
    from pathlib import Path
    from tests.fault import runs
    runs.log_samples(Path({samples!r}))
    {prepare}
"""


def write(folder: Path) -> Path:
    recipe = runs.write_recipe(folder, steps=STEPS)
    site(recipe)
    return recipe


def site(recipe: Path, prepare: str = "") -> None:
    """What every rank of the recipe's runs does when Python starts there."""
    samples = str(recipe.parent / "samples.txt")
    (recipe.parent / "sitecustomize.py").write_text(SITE.format(root=str(ROOT), samples=samples, prepare=prepare))


class Job:
    """`danlu train RECIPE …` or another launcher, with all that it says in said.txt."""

    def __init__(self, recipe: Path, *words: str, launcher: tuple[str, ...] = ("-m", "danlu", "train")) -> None:
        self.recipe = recipe
        environment = os.environ | {"PYTHONPATH": str(recipe.parent), "OMP_NUM_THREADS": "1"}
        with open(recipe.parent / "said.txt", "a") as out:
            self.process = subprocess.Popen(
                [sys.executable, *launcher, str(recipe), *words], env=environment, stdout=out, stderr=out
            )

    def ranks(self) -> list[psutil.Process]:
        """The ranks, in their order."""
        children = psutil.Process(self.process.pid).children()
        return sorted(children, key=lambda each: int(each.environ()["RANK"]))

    def until(self, step: int) -> None:
        """The step stands in metrics.jsonl."""
        path, deadline = runs.folder(self.recipe) / "metrics.jsonl", time.monotonic() + 100
        while not (path.exists() and len(path.read_text().splitlines()) >= step):
            assert time.monotonic() < deadline and self.process.poll() is None, runs.said(self.recipe)
            time.sleep(0.01)

    def end(self, seconds: float = 100) -> int:
        """The exit code; nothing that belongs to the job is left."""
        try:
            code = self.process.wait(seconds)
        finally:
            left = of(self.recipe)
            for process in left:
                process.kill()
        assert not left, f"left behind: {left}"
        return code


def of(recipe: Path) -> list[psutil.Process]:
    """Processes that run this recipe."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(recipe) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture(scope="module")
def unhurt(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run that was left alone; beside it, started in the same second, ran another."""
    first, second = (write(tmp_path_factory.mktemp(name)) for name in ("first", "second"))
    jobs = [Job(recipe, "--nproc", "2") for recipe in (first, second)]
    assert [job.end() for job in jobs] == [0, 0], runs.said(first) + runs.said(second)
    runs.same(first, second)
    yield first


def test_shared_lines_are_said_once_without_control_codes(unhurt: Path) -> None:
    said = runs.said(unhurt)
    lines = [line for line in said.splitlines() if line.strip()]
    assert len(lines) < 40
    assert "\x1b" not in said and "\r" not in said and "[rank" not in said
    assert len(set(lines)) == len(lines)
    assert str(unhurt.parent) not in lines[-1] or len(lines[-1]) < 400


def gated(recipe: Path, name: str) -> runs.Gate:
    """The ranks of the next job wait at this gate, open for five updates."""
    gate = runs.Gate(recipe.parent / name)
    gate.open(5)
    site(recipe, f"runs.Gate(Path({str(gate.path)!r}))()")
    return gate


def wait(what: Callable[[], bool], job: Job) -> None:
    deadline = time.monotonic() + 100
    while not what():
        assert time.monotonic() < deadline and job.process.poll() is None, runs.said(job.recipe)
        time.sleep(0.01)


def test_killed_told_and_told_again_the_run_is_the_one_left_alone(unhurt: Path, tmp_path: Path) -> None:
    recipe = write(tmp_path)

    gate = gated(recipe, "first")
    job = Job(recipe, "--nproc", "2")
    wait(lambda: gate.at() == 5, job)
    job.ranks()[1].kill()
    gate.open(99)
    begun = time.monotonic()
    assert job.end() == 1
    assert time.monotonic() - begun < 25
    lines = runs.said(recipe).splitlines()
    assert lines[-1].startswith("rank 1 was killed by signal 9 (SIGKILL; most likely memory ran out)")
    assert not any("rank 0" in line or "gloo" in line or "Traceback" in line for line in lines)

    runs.forget_said(recipe)
    gate = gated(recipe, "second")
    job = Job(recipe, "--nproc", "2")
    wait(lambda: gate.at() == 5, job)
    job.process.send_signal(signal.SIGTERM)
    wait(lambda: gate.told(0) and gate.told(1), job)
    gate.open(99)
    assert job.end() == 75
    assert runs.said(recipe).count("and saved; the same command goes on") == 1
    assert re.match("stopped by SIGTERM after update [56], and saved", runs.said(recipe).splitlines()[-1])

    runs.forget_said(recipe)
    gate = gated(recipe, "third")
    gate.open(7)
    job = Job(recipe, "--nproc", "2")
    wait(lambda: gate.at() == 7, job)
    for rank in job.ranks():  # a system that tells every process of a job, and the launcher late
        rank.send_signal(signal.SIGTERM)
    wait(lambda: gate.told(0) and gate.told(1), job)
    time.sleep(1.2)
    job.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    gate.open(99)
    assert job.end() == 75
    assert re.match("stopped by SIGTERM after update [78], and saved", runs.said(recipe).splitlines()[-1])

    runs.forget_said(recipe)
    site(recipe)
    assert Job(recipe, "--nproc", "2").end() == 0, runs.said(recipe)
    runs.same(recipe, unhurt)


RAISES = 'runs.Moment("danlu.data.source", "Rows._next", 5, rank=1, fault="this page is torn")()'


def test_a_rank_that_raises_says_why_first_and_the_launcher_names_it(tmp_path: Path) -> None:
    recipe = write(tmp_path)
    site(recipe, RAISES)
    job = Job(recipe, "--nproc", "2")
    job.until(4)
    begun = time.monotonic()
    assert job.end() == 1
    assert time.monotonic() - begun < 25
    lines = [line for line in runs.said(recipe).splitlines() if line.startswith(("[rank", "rank"))]
    assert lines[0].startswith("[rank 1] RuntimeError: in update 5: this page is torn")
    assert lines[1].startswith("rank 1 failed first, with exit code 1: its message stands above")
    assert len(lines) == 2
    assert runs.said(recipe).splitlines()[-1] == lines[1]


SLOW = """
    import time
    def slow(*a, **k):
        Path({mark!r} + os.environ["RANK"]).touch()
        time.sleep(60)
    from danlu.train import measure
    measure.evaluate = slow
"""


def test_a_second_signal_ends_all_ranks_at_once(tmp_path: Path) -> None:
    recipe = write(tmp_path)
    site(recipe, SLOW.format(mark=str(tmp_path / "slow-")))
    job = Job(recipe, "--nproc", "2", "checkpoint.keep_best=0")
    wait(lambda: len(list(tmp_path.glob("slow-*"))) == 2, job)
    job.process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert job.process.poll() is None
    begun = time.monotonic()
    job.process.send_signal(signal.SIGINT)
    assert job.end() == 128 + signal.SIGINT
    assert time.monotonic() - begun < 10
    assert runs.said(recipe).splitlines()[-1].startswith("the ranks were ended at once, by a second signal")


def test_ranks_whose_launcher_is_gone_save_and_leave(tmp_path: Path) -> None:
    recipe = write(tmp_path)
    job = Job(recipe, "--nproc", "2", "max_steps=100000")
    job.until(4)
    job.process.kill()
    job.process.wait()
    deadline = time.monotonic() + 60
    while of(recipe):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    *_, saved, stopped = runs.events(recipe, "saved", "stopped")
    assert saved["step"] == stopped["step"] >= 4
    assert stopped["cause"].startswith(f"stopped by the end of its launcher after update {saved['step']}, and saved")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["batch.global_batch_size=7"], "batch.global_batch_size is 7, which 2 ranks cannot share evenly; 8 would do"),
        (["parallel.shard=4"], "parallel: replicate 1 x shard 4 does not make 2 ranks"),
        (["batch.micro_batch_size=8"], "batch.micro_batch_size is 8, which does not divide the 4 rows of a rank"),
        (["data.sequence_length=65", "optimizer.learning_rat=1"], "2 mistakes"),
    ],
)
def test_what_needs_no_rank_is_refused_before_any_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], says: str
) -> None:
    from danlu.cli.main import main
    from danlu.launch import local

    def never(*arguments: Any, **named: Any) -> int:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(local, "start", never)
    recipe = runs.write_recipe(tmp_path)
    assert main(["train", str(recipe), "--nproc", "2", *words]) == 2
    assert says in capfd.readouterr().err
    assert not runs.folder(recipe).exists()


@pytest.mark.slow
def test_torchrun_starts_it_again_after_a_rank_died(unhurt: Path, tmp_path: Path) -> None:
    """`torchrun --max-restarts`: in torch 2.13 a second attempt could not connect, were its store not its own."""
    recipe = write(tmp_path)
    dies = 'os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and runs.Moment("danlu.train.loop", "step", 5, rank=1)()'
    site(recipe, dies)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    job = Job(recipe, launcher=(*torchrun, "-m", "danlu", "train"))
    assert job.end() == 0, runs.said(recipe)
    assert [event["checkpoint"] for event in runs.events(recipe, "resumed")] == ["step-000003"]
    runs.same(recipe, unhurt)
