"""The ledger's forecast is what tensors really hold at most, to 5 %."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from danlu.core.batch import Batch
from danlu.core.world import World
from danlu.memory.ledger import forecast
from danlu.memory.tracker import Tracker
from danlu.models.attention import MASK_UP_TO
from danlu.recipe.yaml import load
from danlu.train.assemble import build, gather
from danlu.train.step import step

NEAR = 0.05


@dataclass(frozen=True)
class Given:
    """A run: its shape, precision, micro-batch and the rest that decides the bytes."""

    kind: str = "llama"
    width: int = 64
    layers: int = 3
    groups: int = 4
    vocabulary: int = 300
    length: int = 64
    rows: int = 4
    micros: int = 1
    tied: bool = True
    precision: str = "fp32"
    recompute: str = "none"
    packed: bool = False

    def recipe(self, folder: Path) -> str:
        """Its recipe."""
        model = (
            f"kind: llama, hidden_size: {self.width}, num_hidden_layers: {self.layers}, num_attention_heads: 4, "
            f"num_key_value_heads: {self.groups}, intermediate_size: {self.width * 5 // 2}, "
            f"max_position_embeddings: {self.length}"
            if self.kind == "llama"
            else f"kind: gpt2, n_embd: {self.width}, n_layer: {self.layers}, n_head: 4, n_positions: {self.length}"
        )
        (folder / "text.txt").write_text("hello world. " * (self.length // 4))
        return f"""
name: sized
folder: {folder}
max_steps: 9
model: {{{model}, vocab_size: {self.vocabulary}, tie_word_embeddings: {str(self.tied).lower()}}}
data: {{train: [{folder}/text.txt], validation: 0, sequence_length: {self.length}, workers: 0}}
batch: {{global_batch_size: {self.rows * self.micros}, micro_batch_size: {self.rows}}}
optimizer: {{schedule: {{warmup_steps: 1}}}}
memory: {{precision: {self.precision}, recompute: {self.recompute}}}
"""

    def batch(self) -> Batch:
        """Rows that hold as much as rows can: every place has a label; packed ones hold two documents."""
        tokens = torch.randint(self.vocabulary, (self.rows, self.length), generator=torch.Generator().manual_seed(0))
        documents = (torch.arange(self.length) >= self.length // 3).long() * self.packed
        return Batch(
            tokens=tokens,
            labels=tokens.roll(-1, 1),
            positions=torch.arange(self.length).repeat(self.rows, 1),
            documents=documents.repeat(self.rows, 1),
            packed=self.packed,
            samples=("one",) * self.rows,
        )


def measure(given: Given, folder: Path) -> tuple[Tracker, float]:
    """The second update, tracked; and by how much the forecast was too high (below zero: too low)."""
    (folder / "recipe.yaml").write_text(given.recipe(folder))
    recipe = load(str(folder / "recipe.yaml"), [])
    materials = gather(recipe, world=World(), device=torch.device("cpu"), announce=lambda text: None)
    run, batches = build(materials), [given.batch() for _ in range(given.micros)]
    step(run, batches)
    with Tracker() as tracker:
        tracker.hold("weights", run.weights.values())
        tracker.hold("moments", run.optim.state().values())
        for batch in batches:
            tracker.hold("batch", [batch.tokens, batch.labels, batch.positions, batch.documents])
        step(run, batches)
    case = materials.case if given.packed else replace(materials.case, path=None)
    return tracker, forecast(case).peak / tracker.peak - 1


MIDDLING = Given(width=192, layers=4, vocabulary=4096, length=256, rows=2)
LONG = Given(length=2 * MASK_UP_TO, rows=1, packed=True)
SMALL = Given()
CASES = [
    SMALL,
    *(replace(SMALL, rows=rows) for rows in (1, 2, 8)),
    replace(SMALL, micros=3),
    replace(SMALL, groups=2),
    replace(SMALL, tied=False),
    replace(SMALL, tied=False, micros=2, precision="bf16"),
    replace(SMALL, width=128, layers=1, vocabulary=9000, rows=1),
    replace(SMALL, width=128, layers=2, vocabulary=300, length=16, rows=1),
    replace(SMALL, width=128, layers=1, vocabulary=9000, length=16, rows=1, tied=False, micros=2),
    *(replace(SMALL, packed=True, precision=precision) for precision in ("fp32", "bf16")),
    *(replace(SMALL, recompute=kind, packed=True, rows=8) for kind in ("selective", "full", "{budget: 0.4}")),
    *(replace(SMALL, recompute=kind, precision="bf16", micros=2) for kind in ("selective", "full")),
    *(replace(SMALL, recompute=kind, layers=8, rows=8) for kind in ("selective", "full", "{budget: 0.4}")),
    replace(SMALL, kind="gpt2"),
    replace(SMALL, kind="gpt2", precision="bf16", packed=True, micros=2),
    *(replace(SMALL, kind="gpt2", recompute=kind, rows=8) for kind in ("selective", "full")),
    replace(SMALL, kind="gpt2", recompute="full", precision="bf16", tied=False),
    LONG,
    replace(LONG, precision="bf16", recompute="selective"),
    replace(LONG, kind="gpt2", recompute="full"),
    MIDDLING,
    replace(MIDDLING, precision="bf16", packed=True, recompute="selective"),
    replace(MIDDLING, kind="gpt2", recompute="full", tied=False),
    *(replace(SMALL, precision=precision) for precision in ("fp64", "bf16_pure", "fp16")),
    replace(SMALL, kind="gpt2", precision="bf16_pure", rows=8),
]


@pytest.mark.parametrize("given", CASES, ids=str)
def test_the_forecast_is_within_5_percent_of_the_tracked_peak(given: Given, tmp_path: Path) -> None:
    tracker, off = measure(given, tmp_path)
    assert abs(off) <= NEAR, (off, tracker.parts(), tracker.pieces()[:20])


def test_the_average_stays_where_states_lie_in_a_file(tmp_path: Path) -> None:
    """Four bytes a number of the weights more are forecast, and are really held."""
    (tmp_path / "recipe.yaml").write_text(MIDDLING.recipe(tmp_path))
    away = ["memory.offload=[optimizer]", f"memory.offload_folder={tmp_path}/states"]
    peaks = {}
    for average in ("null", "{decay: 0.9}"):
        recipe = load(str(tmp_path / "recipe.yaml"), [*away, f"optimizer.average={average}"])
        materials = gather(recipe, world=World(), device=torch.device("cpu"), announce=lambda text: None)
        run, case = build(materials), replace(materials.case, path=None)
        step(run, [MIDDLING.batch()])
        with Tracker() as tracker:
            tracker.hold("weights", run.weights.values())
            tracker.hold("moments", run.optim.here())
            step(run, [MIDDLING.batch()])
        run.source.close()
        peaks[average] = forecast(case).peak
        assert peaks[average] == pytest.approx(tracker.peak, rel=NEAR), average
        assert case.elsewhere >= 8 * case.parameters
    assert peaks["{decay: 0.9}"] - peaks["null"] == 4 * case.parameters
