"""Batches of any size: growing ones, ones given in tokens, and very large ones. The layout never changes the result."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from danlu.core.world import World
from danlu.memory.tracker import Tracker
from danlu.recipe.yaml import load
from danlu.train.assemble import build, gather
from danlu.train.step import step
from tests.equal.curves import Curve, _whole, curve, write_recipe
from tests.ranks import Ranks

EXACT = 1e-12
RAMP = "batch.ramp={from: 2, steps: 3}"  # updates of 2, 4, 6, 8 and 8 rows
SIZES = [2, 4, 6, 8, 8]
LARGE = """
name: large
folder: {folder}
max_steps: 1
model: {{kind: llama, hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 1, intermediate_size: 8,
         max_position_embeddings: 64}}
data: {{tokenizer: byte, train: [{text}], validation: 0, sequence_length: 64, split: line}}
batch: {{global_batch_tokens: {tokens}}}
optimizer: {{learning_rate: 1e-2, max_grad_norm: 0.5, max_grad_value: 0.05, average: {{decay: 0.9}}}}
memory: {{precision: fp64}}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_recipe(tmp_path_factory.mktemp("batches")))


@pytest.fixture(scope="module")
def grown(recipe: str) -> Curve:
    made = curve(World(), recipe, [RAMP])
    assert [len(samples) for samples in made.samples] == SIZES
    return made


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_a_growing_batch_in_one_process(grown: Curve, recipe: str, micro: int) -> None:
    """Micro-batches of 4 rows leave a last one of 2 in the updates of 2 and 6 rows."""
    other = curve(World(), recipe, [RAMP, f"batch.micro_batch_size={micro}"])
    assert grown.distance(other) <= EXACT and grown.samples == other.samples


@pytest.mark.parametrize("micro", [2, 4])
@pytest.mark.parametrize("axis", ["replicate", "shard"])
def test_a_growing_batch_on_two_ranks(grown: Curve, recipe: str, ranks: Ranks, axis: str, micro: int) -> None:
    first, second = ranks.run(curve, recipe, [RAMP, f"parallel.{axis}=2", f"batch.micro_batch_size={micro}"], size=2)
    assert grown.distance(first) <= EXACT and grown.distance(second) <= EXACT
    assert [a + b for a, b in zip(first.samples, second.samples)] == grown.samples


def test_a_growing_batch_reads_the_same_line_of_samples(grown: Curve, recipe: str) -> None:
    flat = curve(World(), recipe, [])
    line = [sample for update in flat.samples for sample in update]
    assert [sample for update in grown.samples for sample in update] == line[: sum(SIZES)]


@pytest.mark.parametrize(("saved_on", "resumed_on"), [(1, 1), (2, 1), (1, 2)])
def test_a_growing_batch_goes_on_within_its_growth(
    grown: Curve, recipe: str, ranks: Ranks, tmp_path: Path, saved_on: int, resumed_on: int
) -> None:
    plan = [RAMP, "batch.micro_batch_size=2"]
    ranks.run(curve, recipe, plan, 0, str(tmp_path), size=saved_on)
    for made in ranks.run(curve, recipe, plan, 2, str(tmp_path), size=resumed_on):
        rest = Curve(grown.losses[2:], grown.norms[2:], grown.weights[2:], grown.samples[2:], grown.end)
        assert rest.distance(made) <= EXACT


def test_growing_over_tokens(recipe: str) -> None:
    """576 tokens are 18 rows: sizes turn at the first update after 6, 12 and 18 of them."""
    made = curve(World(), recipe, ["batch.ramp={from: 2, tokens: 576}"])
    assert [len(samples) for samples in made.samples] == [2, 2, 2, 4, 4]


def test_updates_of_a_run_given_in_tokens_or_epochs(recipe: str) -> None:
    def total(*typed: str) -> int:
        given = load(recipe, ["max_steps=null", *typed])
        made = gather(given, world=World(), device=torch.device("cpu"), announce=lambda text: None)
        made.rows.close()
        return made.total

    rows = -(-4000 // 32)  # 125 rows: 2 + 4 + 6, then eights
    assert total("max_tokens=4000") == -(-rows // 8)
    assert total("max_tokens=4000", RAMP) == 3 + -(-(rows - 12) // 8)
    assert total("num_train_epochs=2", RAMP) > total("num_train_epochs=2") > 3


def large(folder: Path, tokens: int) -> str:
    source = np.random.default_rng(3)
    lines = ["".join(chr(97 + int(c)) for c in source.integers(0, 26, int(n))) for n in source.integers(1, 90, 500)]
    (folder / "lines.txt").write_text("\n".join(lines))
    path = folder / "large.yaml"
    path.write_text(LARGE.format(folder=folder / "runs", text=folder / "lines.txt", tokens=tokens))
    return str(path)


def updated(world: World, recipe: str, micro: int, overrides: list[str]) -> tuple[dict[str, np.ndarray], int]:
    """What one update came to; and, in one process, the most bytes of tensors, its batch included."""
    torch.use_deterministic_algorithms(True)
    given = load(recipe, [f"batch.micro_batch_size={micro}", "data.workers=0", *overrides])
    materials = gather(given, world=world, device=torch.device("cpu"), announce=lambda text: None)
    run = build(materials)
    batches = run.source.take(materials.micros)
    tracker = Tracker()
    with tracker if world.size == 1 else nullcontext():
        report = step(run, batches)
    run.source.close()
    found = {name: _whole(weight) for name, weight in run.weights.items()}
    found |= {key: _whole(value) for key, value in run.optim.state().items()}
    found["loss"], found["norm"] = np.asarray(report.losses.total()), np.asarray(report.norm)
    return found, tracker.peak


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys() and any(key.startswith("average/") for key in one)
    for key, value in one.items():
        assert np.max(np.abs(value - other[key]) / np.maximum(np.abs(value), 1.0)) <= EXACT, key


def one_update(folder: Path, ranks: Ranks, *, tokens: int, micros: tuple[int, int]) -> None:
    """However the update is cut, it is the same; and its memory is that of a micro-batch, not of the update."""
    recipe, (large_micro, small_micro) = large(folder, tokens), micros
    whole, most = updated(World(), recipe, large_micro, [])
    cut, least = updated(World(), recipe, small_micro, [])
    same(whole, cut)
    for plan in (["parallel.shard=2"], ["parallel.replicate=2"]):
        for made, _ in ranks.run(updated, recipe, small_micro, plan, size=2):
            same(whole, made)
    fewer = 4 * small_micro * 64
    _, few = updated(World(), recipe, small_micro, [f"batch.global_batch_tokens={fewer}"])
    most, least, few = (
        most - 32 * tokens,
        least - 32 * tokens,
        few - 32 * fewer,
    )  # without the rows: 4 x 8 bytes a token
    assert most > 3 * least, "memory does not go with the micro-batch"
    assert abs(least - few) <= 0.01 * few, "memory goes with the update"


def test_an_update_of_65536_tokens(tmp_path: Path, ranks: Ranks) -> None:
    one_update(tmp_path, ranks, tokens=65_536, micros=(256, 32))


@pytest.mark.long
def test_an_update_of_a_million_tokens(tmp_path: Path, ranks: Ranks) -> None:
    one_update(tmp_path, ranks, tokens=1_048_576, micros=(1024, 128))
