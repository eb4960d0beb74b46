"""A run's folder: gone on with, finished, refused, damaged, read-only, full: one plain sentence; nothing is lost."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import danlu
from tests.fault import runs
from tests.fault.disks import mounted
from tests.fault.runs import Moment

SHIPPED = Path(danlu.__file__).parent / "recipe" / "shipped" / "tokenizer"


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run at its end. Not to be changed: tests take copies."""
    recipe = runs.write_recipe(tmp_path_factory.mktemp("done"), steps=9)
    assert runs.finish(recipe) == 0, runs.said(recipe)
    return recipe


@pytest.fixture
def copy(done: Path, tmp_path: Path) -> Path:
    """A copy of it, at a place of its own, that knows the same text."""
    recipe = runs.write_recipe(tmp_path, steps=9)
    shutil.copytree(runs.folder(done), runs.folder(recipe))
    settled = runs.folder(recipe) / "recipe.yaml"
    settled.write_text(settled.read_text().replace(str(done.parent), str(tmp_path)))
    runs.forget_said(recipe)
    return recipe


def contents(recipe: Path) -> dict[Path, bytes]:
    """Every file of the run, but the one that only says who holds it."""
    return {p: p.read_bytes() for p in runs.folder(recipe).rglob("*") if p.is_file() and p.name != ".lock"}


def last(recipe: Path) -> str:
    return runs.said(recipe).splitlines()[-1]


def test_a_finished_run_says_so_and_reads_nothing(copy: Path) -> None:
    before = contents(copy)
    (copy.parent / "lines.txt").unlink()
    copy.write_text(copy.read_text() + "compile: graphs\n")  # changes nothing of it, and does not say that it does
    assert runs.finish(copy) == 0, runs.said(copy)
    assert "from here on" not in runs.said(copy)
    assert "this run is finished (9 updates); --restart begins it anew" in runs.said(copy)
    assert contents(copy) == before


def test_a_run_stopped_early_is_finished_too_until_more_is_asked(tmp_path: Path) -> None:
    recipe = runs.write_recipe(tmp_path)
    early = "evaluate.early_stopping={patience: 1, min_delta: 99}"
    assert runs.finish(recipe, early) == 0, runs.said(recipe)
    assert [line["step"] for line in runs.metrics(recipe)] == list(range(1, 7))  # the first evaluation is a gain
    assert len(runs.events(recipe, "early_stop")) == 1
    runs.forget_said(recipe)
    assert runs.finish(recipe, early) == 0
    assert "this run is finished (6 updates)" in runs.said(recipe)
    assert runs.finish(recipe, "evaluate.early_stopping=null") == 0, runs.said(recipe)
    assert [line["step"] for line in runs.metrics(recipe)] == list(range(1, 31))


def test_longer_is_announced_and_each_step_stands_once(copy: Path) -> None:
    assert runs.finish(copy, "max_steps=12") == 0, runs.said(copy)
    assert "max_steps: was 9, is 12 from here on" in runs.said(copy)
    assert "going on after update 9 of 12" in runs.said(copy)
    assert [line["step"] for line in runs.metrics(copy)] == list(range(1, 13))
    assert runs.finish(copy, "max_steps=10") == 2
    assert "max_steps: 12 there, 10 now" in runs.said(copy)


def test_another_recipe_is_refused_with_every_difference(copy: Path) -> None:
    before = (runs.folder(copy) / "recipe.yaml").read_bytes()
    assert runs.finish(copy, "seed=2", "optimizer.learning_rate=0.5", "model.num_hidden_layers=3") == 2
    said = runs.said(copy)
    assert "is the folder of another recipe" in said and "use --restart to move the old folder aside" in said
    assert "  seed: 1 there, 2 now" in said and "  optimizer.learning_rate: 0.01 there, 0.5 now" in said
    assert "  model.num_hidden_layers: 2 there, 3 now" in said and "max_steps" not in said
    assert (runs.folder(copy) / "recipe.yaml").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model.vocab_size=300"], "  model.vocab_size: 258 there, 300 now"),
        (["data.sequence_length=16"], "  data.sequence_length: 32 there, 16 now"),
        (["data.packing=false"], "  data.packing: True there, False now"),
        (["data.validation=0.2"], "  data.validation: 0.1 there, 0.2 now"),
        (["optimizer={kind: sgd}"], "  optimizer.kind: adamw there, sgd now"),
        (["optimizer.weight_decay=0.5"], "  optimizer.weight_decay: 0.1 there, 0.5 now"),
        (["memory.precision=fp64"], "  memory.precision: fp32 there, fp64 now"),
        (["model={kind: gpt2, n_embd: 32, n_layer: 2, n_head: 4}"], "  model.kind: llama there, gpt2 now"),
        (["data.split=document"], "  data.split: line there, document now"),
    ],
    ids=lambda given: given[0].partition("=")[0] if isinstance(given, list) else "",
)
def test_drift_of_any_kind_is_refused_and_nothing_is_touched(copy: Path, words: list[str], said: str) -> None:
    before = contents(copy)
    assert runs.finish(copy, "max_steps=12", *words) == 2
    assert said in runs.said(copy)
    assert contents(copy) == before


def test_another_tokenizer_is_refused_by_what_it_makes_of_the_text(copy: Path) -> None:
    before = contents(copy)
    assert runs.finish(copy, "max_steps=12", f"data.tokenizer={SHIPPED}") == 2
    assert "has 4096 ids, but the model has 258 rows" in last(copy)
    assert contents(copy) == before


def test_restart_moves_the_old_folder_aside(copy: Path) -> None:
    old = runs.weights(copy)
    assert runs.finish(copy, "--restart", "seed=2") == 0, runs.said(copy)
    assert runs.finish(copy, "--restart", "seed=3") == 0, runs.said(copy)
    aside = sorted(path for path in runs.folder(copy).parent.iterdir() if "-before-" in path.name)
    assert len(aside) == 2
    assert (aside[0] / "model" / "model.safetensors").read_bytes() == old != runs.weights(copy)
    assert [line["step"] for line in runs.metrics(copy)] == list(range(1, 10))


def test_changed_text_is_refused_and_nothing_is_touched(copy: Path) -> None:
    text = copy.parent / "lines.txt"
    text.write_text(text.read_text().replace("c", "C", 1))  # one letter, as many bytes
    before = contents(copy)
    assert runs.finish(copy, "max_steps=12") == 2
    assert "the training data is not what it was when the run began" in last(copy)
    assert contents(copy) == before


def test_a_text_may_move_but_not_change(copy: Path, done: Path) -> None:
    text, moved = copy.parent / "lines.txt", copy.parent / "elsewhere" / "other.txt"
    moved.parent.mkdir()
    text.rename(moved)
    where = f"data.train=[{moved}]"
    assert runs.finish(copy, "max_steps=12", where) == 0, runs.said(copy)
    assert f"data.train.0: was {text}, is {moved} from here on" in runs.said(copy)
    assert [line["loss"] for line in runs.metrics(copy)[:9]] == [line["loss"] for line in runs.metrics(done)]
    moved.write_text(moved.read_text().replace("c", "C", 1))
    assert runs.finish(copy, "max_steps=15", where) == 2
    assert "the training data is not what it was when the run began" in last(copy)


def test_a_text_that_is_only_held_against_may_not_change_either(tmp_path: Path) -> None:
    recipe = runs.write_recipe(tmp_path, steps=3)
    held, moved = tmp_path / "held.txt", tmp_path / "moved.txt"
    held.write_text("abc\nabcd\nabcdefgh\n")
    assert runs.finish(recipe, f"data.validation=[{held}]") == 0, runs.said(recipe)
    held.rename(moved)
    assert runs.finish(recipe, f"data.validation=[{moved}]", "max_steps=6") == 0, runs.said(recipe)
    moved.write_text("abc\nabcd\nabcdefgx\n")
    assert runs.finish(recipe, f"data.validation=[{moved}]", "max_steps=9") == 2
    assert "the validation data is not what it was when the run began" in last(recipe)


def test_a_refused_run_leaves_no_folder_behind(tmp_path: Path) -> None:
    recipe = runs.write_recipe(tmp_path, steps=3)
    assert runs.finish(recipe, "data.train=[nowhere.txt]") == 2
    assert not (tmp_path / "runs").exists()
    (tmp_path / "runs" / "fault").mkdir(parents=True)
    assert runs.finish(recipe, "data.train=[nowhere.txt]") == 2
    assert runs.folder(recipe).exists()


PUBLISH = Moment("danlu.train.finish", "publish")


def test_killed_between_its_last_checkpoint_and_its_model_a_longer_run_does_not_pass_for_finished(
    copy: Path, done: Path
) -> None:
    """The model of nine updates stands there; that of twelve is owed."""
    old = runs.weights(copy)
    assert runs.finish(copy, "max_steps=12", prepare=PUBLISH) == -9
    assert runs.weights(copy) == old
    assert runs.finish(copy, "max_steps=12") == 0, runs.said(copy)
    assert runs.weights(copy) != old
    runs.forget_said(copy)
    assert runs.finish(copy, "max_steps=12") == 0
    assert "this run is finished (12 updates)" in runs.said(copy)


def test_a_longer_run_killed_before_its_first_checkpoint_is_still_longer(copy: Path) -> None:
    assert runs.finish(copy, "max_steps=12", prepare=Moment("danlu.train.loop", "step", 2)) == -9
    assert runs.finish(copy, "max_steps=12") == 0, runs.said(copy)
    assert [line["step"] for line in runs.metrics(copy)] == list(range(1, 13))


def test_killed_after_it_was_stopped_early_it_does_not_train_on(tmp_path: Path) -> None:
    recipe = runs.write_recipe(tmp_path)
    early = "evaluate.early_stopping={patience: 1, min_delta: 99}"
    assert runs.finish(recipe, early, prepare=PUBLISH) == -9
    assert runs.finish(recipe, early) == 0, runs.said(recipe)
    assert [line["step"] for line in runs.metrics(recipe)] == list(range(1, 7))
    assert runs.weights(recipe)


def test_a_flipped_byte_falls_back_to_the_checkpoint_before(copy: Path, done: Path) -> None:
    shard = runs.folder(copy) / "checkpoints" / "step-000009" / "rank-000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-100] ^= 1
    shard.write_bytes(content)
    shutil.rmtree(runs.folder(copy) / "model")
    assert runs.finish(copy) == 0, runs.said(copy)
    assert "step-000009 was skipped: rank-000.safetensors" in runs.said(copy)
    assert "going on after update 6 of 9" in runs.said(copy)
    [resumed] = runs.events(copy, "resumed")
    assert resumed["checkpoint"] == "step-000006" and "step-000009 was skipped" in resumed["skipped"][0]
    assert runs.metrics(copy) == runs.metrics(done) and runs.weights(copy) == runs.weights(done)


def test_no_whole_checkpoint_is_refused(copy: Path) -> None:
    for shard in (runs.folder(copy) / "checkpoints").glob("*/rank-000.safetensors"):
        shard.write_bytes(shard.read_bytes()[:-1])
    assert runs.finish(copy, "max_steps=12") == 2
    assert "no checkpoint is whole" in last(copy) and "start anew with --restart" in last(copy)


@dataclass(frozen=True)
class Wait:
    """The first evaluation waits for a file."""

    go: Path
    mark: Path

    def __call__(self) -> None:
        from danlu.train import measure

        whole = measure.evaluate

        def evaluate(*arguments: object, **named: object) -> object:
            self.mark.touch()
            while not self.go.exists():
                time.sleep(0.02)
            return whole(*arguments, **named)  # type: ignore[arg-type]

        measure.evaluate = evaluate  # type: ignore[assignment]


def test_a_second_run_in_the_folder_is_refused_also_with_restart(tmp_path: Path) -> None:
    recipe = runs.write_recipe(tmp_path, steps=9)
    wait = Wait(tmp_path / "go", tmp_path / "mark")
    first = runs.start(recipe, prepare=wait)
    while not wait.mark.exists():
        time.sleep(0.02)
        assert first[0].exitcode is None, runs.said(recipe)
    for words in ((), ("--restart",), ("seed=2",)):
        runs.forget_said(recipe)
        assert runs.finish(recipe, *words) == 2
        assert f"another run is at work there (process {first[0].pid} on" in last(recipe)
    wait.go.touch()
    assert runs.end(first) == [0], runs.said(recipe)
    assert [line["step"] for line in runs.metrics(recipe)] == list(range(1, 10))


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    recipe = runs.write_recipe(tmp_path, steps=3)
    runs.folder(recipe).parent.mkdir()
    runs.folder(recipe).write_text("I was here first")
    assert runs.finish(recipe) == 2
    assert str(runs.folder(recipe)) in last(recipe) and "give it another place with folder=" in last(recipe)
    assert runs.folder(recipe).read_text() == "I was here first"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own of 3 MB."""
    with mounted(tmp_path / "disk", kilobytes=3 * 1024) as place:
        yield place


def test_a_read_only_disk_is_refused_at_once(disk: Path, tmp_path: Path) -> None:
    recipe = runs.write_recipe(tmp_path, steps=3)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert runs.finish(recipe, f"folder={disk}/runs") == 2
    assert "no run can be kept there (Read-only file system" in last(recipe) and f"{disk}/runs/fault" in last(recipe)


@dataclass(frozen=True)
class Fill:
    """Before the given update, what is left of a disk is taken; after another one it is given back."""

    disk: Path
    full: int
    free: int

    def __call__(self) -> None:
        from danlu.train import loop

        whole, filler, updates = loop.step, self.disk / "filler", 0

        def step(*arguments: object) -> object:
            nonlocal updates
            updates += 1
            if updates == self.full:
                with open(filler, "wb", buffering=0) as file:
                    try:
                        while file.write(bytes(4096)):
                            pass
                    except OSError:
                        file.truncate(file.tell() - 20 * 4096)  # room for lines, not for a checkpoint
            if updates == self.free:
                filler.unlink()
            return whole(*arguments)  # type: ignore[arg-type]

        loop.step = step  # type: ignore[assignment]


def _on(disk: Path, recipe: Path) -> list[str]:
    """The recipe's run folder lies on this disk."""
    (recipe.parent / "runs").symlink_to(disk)
    return [f"folder={recipe.parent}/runs"]


def test_a_full_disk_that_has_room_again_costs_one_checkpoint(disk: Path, tmp_path: Path, done: Path) -> None:
    recipe = runs.write_recipe(tmp_path, steps=9)
    assert runs.finish(recipe, *_on(disk, recipe), prepare=Fill(disk, full=5, free=8)) == 0, runs.said(recipe)
    [missed] = runs.events(recipe, "not_saved")
    assert missed["step"] == 6 and "the disk is full" in missed["cause"] and "bytes needed" in missed["cause"]
    assert "step 6 was not saved" in runs.said(recipe)
    assert [event["step"] for event in runs.events(recipe, "saved")] == [3, 9]
    assert runs.metrics(recipe) == runs.metrics(done) and runs.weights(recipe) == runs.weights(done)


def test_a_disk_that_stays_full_ends_the_run_with_3_and_the_checkpoint_before_is_good(
    disk: Path, tmp_path: Path
) -> None:
    recipe = runs.write_recipe(tmp_path, steps=9)
    where = _on(disk, recipe)
    assert runs.finish(recipe, *where, prepare=Fill(disk, full=5, free=99)) == 3, runs.said(recipe)
    assert "the disk is full" in last(recipe)
    assert [path.name for path in (runs.folder(recipe) / "checkpoints").iterdir()] == ["step-000003"]
    (disk / "filler").unlink()
    assert runs.finish(recipe, *where) == 0, runs.said(recipe)
    assert [event["checkpoint"] for event in runs.events(recipe, "resumed")] == ["step-000003"]
    assert [line["step"] for line in runs.metrics(recipe)] == list(range(1, 10))


def test_told_to_stop_on_a_full_disk_does_not_claim_to_have_saved(disk: Path, tmp_path: Path) -> None:
    recipe = runs.write_recipe(tmp_path, steps=30)
    fill, told = Fill(disk, full=4, free=99), Moment("danlu.compute.layer", "ComputeLayer.norm", 5, 15)

    assert runs.finish(recipe, *_on(disk, recipe), prepare=Both(fill, told)) == 3, runs.said(recipe)
    assert "stopped by SIGTERM after update 5, but that could not be kept" in last(recipe)
    assert "the disk is full" in last(recipe)


@dataclass(frozen=True)
class Both:
    """Two things are prepared."""

    first: Fill
    second: Moment

    def __call__(self) -> None:
        self.first()
        self.second()


def test_a_disk_too_small_for_one_checkpoint_is_refused_at_start(disk: Path, tmp_path: Path) -> None:
    recipe = runs.write_recipe(tmp_path, steps=9)
    where = _on(disk, recipe)
    assert runs.finish(recipe, *where, "model.hidden_size=256", "model.num_hidden_layers=4") == 2, runs.said(recipe)
    assert "full" in last(recipe) or "free" in last(recipe)
    assert not any((runs.folder(recipe) / "checkpoints").glob("step-*"))


def test_everything_a_run_writes_is_json_a_line(done: Path) -> None:
    for name in ("metrics.jsonl", "events.jsonl"):
        for line in (runs.folder(done) / name).read_text().splitlines():
            assert "step" in json.loads(line)
