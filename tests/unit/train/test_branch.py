"""A run's checkpoint becomes the start of another run; the old one stays as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from danlu.core.errors import InputError
from danlu.core.paths import RunFolder
from danlu.recipe.yaml import load
from danlu.train.branch import branch
from tests.fault import runs


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of twelve updates that kept the checkpoints of 6, 9 and 12."""
    recipe = runs.write_recipe(tmp_path_factory.mktemp("branch"), steps=12)
    words = ("checkpoint.keep_last=3", "compile=false")
    assert runs.finish(recipe, *words) == 0, runs.said(recipe)
    return RunFolder(runs.folder(recipe))


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def made(old: RunFolder, *words: str, to: int = 9) -> tuple[RunFolder, list[str]]:
    said: list[str] = []
    recipe = branch(old.root, to=to, overrides=list(words), announce=said.append)
    return RunFolder(recipe.parent), said


def test_it_stands_at_the_step_with_its_changes_and_the_old_run_is_untouched(old: RunFolder) -> None:
    before = {path: path.read_bytes() for path in sorted(old.root.rglob("*")) if path.is_file()}
    new, said = made(old, "optimizer.learning_rate=1e-3", "max_steps=15")
    assert new.root == old.root.with_name("fault-from-9")
    assert sorted(path.name for path in new.checkpoints.iterdir()) == ["step-000009"]
    for file in (old.checkpoints / "step-000009").iterdir():
        assert file.samefile(new.checkpoints / "step-000009" / file.name)  # no byte was copied
    assert lines(new.metrics) == [line for line in lines(old.metrics) if line["step"] <= 9]
    [event] = lines(new.events)
    assert (event["event"], event["step"], event["run"]) == ("branched", 9, str(old.root))
    assert event["changes"] == {"optimizer.learning_rate": [0.01, 0.001], "max_steps": [12, 15]}
    recipe = load(str(new.recipe))
    assert (recipe.name, recipe.optimizer.learning_rate, recipe.max_steps) == ("fault-from-9", 1e-3, 15)
    assert recipe.run_folder == new.root
    assert any("optimizer.learning_rate: was 0.01, is 0.001" in text for text in said)
    after = {path: path.read_bytes() for path in sorted(old.root.rglob("*")) if path.is_file()}
    assert after.pop(old.events).startswith(before.pop(old.events))
    after.pop(old.lock, None), before.pop(old.lock, None)
    assert after == before
    assert lines(old.events)[-1]["event"] == "branch" and lines(old.events)[-1]["run"] == str(new.root)
    again, _ = made(old)
    assert again.root.name == "fault-from-9-2"


def test_a_step_that_is_not_kept_is_refused_with_those_that_are(old: RunFolder) -> None:
    with pytest.raises(InputError, match=r"no checkpoint of step 7 is kept; these are: 6 .*9 .*12 ") as refusal:
        made(old, to=7)
    assert "evaluation loss" in str(refusal.value)
    assert not list(old.root.parent.glob("*from-7*"))


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("seed=2", "the order of the data follows from it"),
        ("model.hidden_size=64", "the weights would not fit"),
        ("data.sequence_length=16", "where the run stands in the data would mean nothing"),
        ("optimizer={kind: lion}", "would mean nothing to another kind"),
        ("optimizer.average={decay: 0.9}", "kept from the first update on"),
        ("memory.precision=fp64", "stored in that precision"),
        ("max_steps=8", "stands at step 9 already"),
        ("optimizer.lerning_rate=1", "did you mean optimizer.learning_rate"),
    ],
)
def test_what_cannot_change_is_refused_with_a_sentence(old: RunFolder, word: str, why: str) -> None:
    before = sorted(path.name for path in old.root.parent.iterdir())
    with pytest.raises(InputError, match=why):
        made(old, word)
    assert sorted(path.name for path in old.root.parent.iterdir()) == before


@pytest.mark.parametrize(
    "words",
    [
        ("optimizer.schedule.kind=linear", "optimizer.schedule.warmup_steps=2"),
        ("optimizer.max_grad_norm=0.1", "optimizer.betas=[0.8, 0.9]", "optimizer.weight_decay=0"),
        ("max_steps=null", "num_train_epochs=3"),
        ("batch.global_batch_size=16",),
        ("monitor.spikes=null", "checkpoint.save_steps=1", "evaluate.eval_steps=2"),
        ("name=mine",),
    ],
)
def test_what_may_change_does(old: RunFolder, words: tuple[str, ...]) -> None:
    new, _ = made(old, *words)
    assert load(str(new.recipe)) == load(str(new.recipe), words)


def test_all_that_cannot_be_is_told_at_once(old: RunFolder) -> None:
    words = ("optimizer.kind=sgd", "model.hidden_size=64", "seed=2", "batch.globl_batch_size=4")
    with pytest.raises(InputError) as refusal:
        made(old, *words)
    for told in ("batch.globl_batch_size", "optimizer.kind is adamw", "model.hidden_size is 32", "seed is "):
        assert told in str(refusal.value)


def test_a_micro_batch_that_does_not_fit_the_new_batch_is_chosen_anew_unless_it_is_asked_for(old: RunFolder) -> None:
    assert load(str(old.recipe)).batch.micro_batch_size == 8
    new, said = made(old, "name=small", "batch.global_batch_size=4")
    assert load(str(new.recipe)).batch.micro_batch_size == "auto"
    assert "batch.micro_batch_size: was 8, is auto from here on" in said
    larger, _ = made(old, "name=large", "batch.global_batch_size=16")
    assert load(str(larger.recipe)).batch.micro_batch_size == 8
    with pytest.raises(InputError, match="micro_batch_size"):
        made(old, "name=none", "batch.global_batch_size=4", "batch.micro_batch_size=8")


def test_a_damaged_checkpoint_is_refused(old: RunFolder) -> None:
    shard = next((old.checkpoints / "step-000006").glob("*.safetensors"))
    content = shard.read_bytes()
    try:
        shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(InputError, match=r"step-000006 is damaged.*others kept: 9, 12"):
            made(old, to=6)
    finally:
        shard.write_bytes(content)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no run's folder"):
        branch(tmp_path, to=1, overrides=[], announce=print)


def test_a_name_that_is_taken_is_refused(old: RunFolder) -> None:
    made(old, "name=taken")
    with pytest.raises(InputError, match="is there already; give the new run another name"):
        made(old, "name=taken")
    with pytest.raises(InputError, match="fault is there already; give the new run another name"):
        made(old, f"name={old.root.name}")


def test_without_changes_it_becomes_what_the_old_run_became_to_the_bit(old: RunFolder) -> None:
    new, _ = made(old, "name=same")
    assert runs.finish(new.recipe) == 0
    timeless = ("step", "loss", "learning_rate", "grad_norm", "tokens", "sound", "eval_loss")
    both = [[{key: line.get(key) for key in timeless} for line in lines(run.metrics)] for run in (old, new)]
    assert both[0] == both[1]
    weights = [(run.model / "model.safetensors").read_bytes() for run in (old, new)]
    assert weights[0] == weights[1]
    assert [event["event"] for event in lines(new.events)][:2] == ["branched", "resumed"]


def test_it_goes_on_with_its_changes(old: RunFolder) -> None:
    new, _ = made(old, "name=changed", "optimizer.learning_rate=1e-3", "max_steps=15", "batch.global_batch_size=16")
    assert runs.finish(new.recipe) == 0
    found = lines(new.metrics)
    assert [line["step"] for line in found] == list(range(1, 16))
    assert found[:9] == lines(old.metrics)[:9]
    assert all(line["learning_rate"] <= 1e-3 for line in found[9:]) and found[8]["learning_rate"] > 1e-3
    assert found[-1]["loss"] < found[8]["loss"]
