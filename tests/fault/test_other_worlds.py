"""What the number of ranks and micro-batches must not change: rates, rows, names, and where a run can go on."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.fault import runs


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one process that was left alone, in float64."""
    recipe = runs.write_recipe(tmp_path_factory.mktemp("one"), steps=12)
    assert runs.finish(recipe, "memory.precision=fp64") == 0, runs.said(recipe)
    return recipe


def rates(recipe: Path) -> list[float]:
    return [line["learning_rate"] for line in runs.metrics(recipe)]


def alike(recipe: Path, reference: Path) -> None:
    """Every number of every update is the same up to rounding in float64; so are the published weights."""
    ours, theirs = runs.metrics(recipe), runs.metrics(reference)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs] == list(range(1, 13))
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        assert all(math.isclose(a[key], b[key], rel_tol=1e-12) for key in a)
    ours, theirs = (load_file(runs.folder(r) / "model" / "model.safetensors") for r in (recipe, reference))
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], theirs[name], rtol=1e-12, atol=1e-14) for name in ours)


def read(recipe: Path) -> dict[int, list[str]]:
    """The ids of each global batch, over all ranks."""
    found: dict[int, list[str]] = {}
    for (_, at), ids in sorted(runs.samples(recipe).items()):
        found.setdefault(at, []).extend(ids)
    return found


@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2)])
def test_a_run_goes_on_with_other_ranks(one: Path, tmp_path: Path, first: int, then: int) -> None:
    """Micro-batches that were settled for the old number of ranks are settled anew."""
    recipe = runs.write_recipe(tmp_path, steps=12)
    stop = runs.Moment("danlu.train.loop", "step", 7, 15)
    assert runs.finish(recipe, "memory.precision=fp64", prepare=stop, ranks=first) == 75, runs.said(recipe)
    assert f"shard: {first}" in (runs.folder(recipe) / "recipe.yaml").read_text()
    assert runs.finish(recipe, "memory.precision=fp64", ranks=then) == 0, runs.said(recipe)
    [started, resumed] = runs.events(recipe, "started", "resumed")
    assert (started["world"], resumed["world"], resumed["checkpoint"]) == (first, then, "step-000007")
    alike(recipe, one)
    assert rates(recipe) == rates(one)
    for at, ids in read(one).items():
        assert sorted(read(recipe)[at]) == sorted(ids)


@pytest.mark.parametrize(("ranks", "micro"), [(1, 2), (1, 1), (2, 1), (2, 4)], ids=lambda given: str(given))
def test_rates_do_not_depend_on_ranks_or_accumulation(one: Path, tmp_path: Path, ranks: int, micro: int) -> None:
    recipe = runs.write_recipe(tmp_path, steps=12)
    given = ("memory.precision=fp64", f"batch.micro_batch_size={micro}")
    assert runs.finish(recipe, *given, ranks=ranks) == 0, runs.said(recipe)
    assert rates(recipe) == rates(one)
    alike(recipe, one)


def test_rates_are_the_schedule_counted_in_updates_also_after_two_resumes(one: Path, tmp_path: Path) -> None:
    cosine = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (update - 3) / 9)) for update in range(4, 13)]
    assert rates(one) == pytest.approx([0.01 * share for share in (1 / 3, 2 / 3, 1, *cosine)], rel=1e-12)
    assert rates(one)[-1] == pytest.approx(0.001, rel=1e-12)

    recipe = runs.write_recipe(tmp_path, steps=12)
    for update in (5, 3):
        stop = runs.Moment("danlu.train.loop", "step", update, 15)
        assert runs.finish(recipe, "memory.precision=fp64", prepare=stop) == 75, runs.said(recipe)
    assert runs.finish(recipe, "memory.precision=fp64") == 0, runs.said(recipe)
    assert [event["checkpoint"] for event in runs.events(recipe, "resumed")] == ["step-000005", "step-000008"]
    runs.same(recipe, one)


def test_every_row_of_an_uneven_set_is_read_once_an_epoch(tmp_path: Path) -> None:
    """Seven rows on two ranks, twice over: each once an epoch, what a batch lacks is padding, and orders differ."""
    recipe = runs.write_recipe(tmp_path)
    (tmp_path / "lines.txt").write_text("\n".join("abcdefg"[n] * (3 + n) for n in range(7)))
    given = ["max_steps=null", "num_train_epochs=2", "data.packing=false", "data.validation=0"]
    given += ["batch.global_batch_size=4", "checkpoint.keep_best=0"]
    assert runs.finish(recipe, *given, ranks=2) == 0, runs.said(recipe)
    ids = [sample for _, batch in sorted(read(recipe).items()) for sample in batch]
    rows = [sample for sample in ids if sample]
    assert len(ids) == 16 and len(rows) == len(set(rows)) == 14
    epochs = [[row for row in rows if row.split(":")[1] == epoch] for epoch in "01"]
    orders = [[row.split(":")[2] for row in epoch] for epoch in epochs]
    assert [sorted(order) for order in orders] == [list("0123456")] * 2 and orders[0] != orders[1]
    lines = [json.loads(line) for line in (runs.folder(recipe) / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    whole = sum(3 + n + 1 for n in range(7))  # each with its end
    assert lines[-1]["tokens"] == 2 * whole


def names(recipe: Path, step: int) -> set[str]:
    return {
        name
        for path in (runs.folder(recipe) / "checkpoints" / f"step-{step:06d}").glob("*.safetensors")
        for name in load_file(path)
        if not name.startswith("stream/")
    }


def test_a_tie_stays_a_tie_when_it_is_cut_saved_and_resumed(one: Path, tmp_path: Path) -> None:
    """Stored once, under the same names in every layout, and the published model is tied."""
    recipe = runs.write_recipe(tmp_path, steps=12)
    stop = runs.Moment("danlu.train.loop", "step", 5, 15)
    given = ("memory.precision=fp64", "parallel.shard=2")
    assert runs.finish(recipe, *given, prepare=stop, ranks=2) == 75, runs.said(recipe)
    assert names(recipe, 5) == names(one, 9)
    assert "weights/embed.weight" in names(one, 9) and not any("head" in name for name in names(one, 9))
    assert not any("module" in name or "_orig" in name for name in names(one, 9))
    assert runs.finish(recipe, *given, ranks=2) == 0, runs.said(recipe)
    assert names(recipe, 12) == names(one, 12)
    alike(recipe, one)
    assert "lm_head.weight" not in load_file(runs.folder(recipe) / "model" / "model.safetensors")
    assert json.loads((runs.folder(recipe) / "model" / "config.json").read_text())["tie_word_embeddings"] is True
