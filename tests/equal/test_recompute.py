"""Recomputed activations change no gradient: to the bit on one process, to 1e-12 in float64 on several."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from danlu.core.world import World
from danlu.train.run import Run
from tests.equal.curves import write_recipe
from tests.equal.gradients import Gradients, apart, gradients
from tests.ranks import Ranks

EXACT = 1e-12
KINDS = ["full", "selective", "{budget: 0.4}", "{budget: 0.7}"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_recipe(tmp_path_factory.mktemp("recompute")))


@pytest.fixture(scope="module")
def kept(recipe: str) -> dict[str, Gradients]:
    """Nothing is recomputed, in each precision."""
    return {name: gradients(World(), recipe, [f"memory.precision={name}"]) for name in ("fp64", "fp32", "bf16")}


def _same(ours: Gradients, theirs: Gradients) -> bool:
    return all((a[name] == b[name]).all() for a, b in zip(ours, theirs, strict=True) for name in a)


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_process_to_the_bit(recipe: str, kept: dict[str, Gradients], kind: str, precision: str) -> None:
    made = gradients(World(), recipe, [f"memory.recompute={kind}", f"memory.precision={precision}"])
    assert _same(kept[precision], made)


@pytest.mark.parametrize("precision", ["fp16", "fp8"])
def test_low_precisions(recipe: str, precision: str) -> None:
    made = [
        gradients(World(), recipe, [f"memory.recompute={kind}", f"memory.precision={precision}"])
        for kind in ("none", "full", "selective")
    ]
    assert _same(made[0], made[1]) and _same(made[0], made[2])


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_several_micro_batches(recipe: str, kept: dict[str, Gradients], kind: str) -> None:
    made = gradients(World(), recipe, [f"memory.recompute={kind}", "batch.micro_batch_size=2"])
    assert apart(kept["fp64"], made) <= EXACT


@pytest.mark.parametrize("micro", [4, 2])
@pytest.mark.parametrize("kind", ["full", "selective", "{budget: 0.4}"])
def test_two_ranks(recipe: str, kept: dict[str, Gradients], ranks: Ranks, kind: str, micro: int) -> None:
    plan = ["parallel.shard=2", f"batch.micro_batch_size={micro}", f"memory.recompute={kind}"]
    for made in ranks.run(gradients, recipe, plan, size=2):
        assert apart(kept["fp64"], made) <= EXACT


def test_two_ranks_to_the_bit_in_bf16(recipe: str, ranks: Ranks) -> None:
    plan = ["parallel.shard=2", "batch.micro_batch_size=2", "memory.precision=bf16"]
    none = ranks.run(gradients, recipe, plan, size=2)
    for kind in ("full", "selective"):
        made = ranks.run(gradients, recipe, [*plan, f"memory.recompute={kind}"], size=2)
        assert all(_same(a, b) for a, b in zip(none, made, strict=True))


@pytest.mark.parametrize("family", ["gpt2", "long"])
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_another_family_and_attention_path(tmp_path: Path, kind: str, family: str) -> None:
    """GPT-2's parts; and rows so long that each document is attended to by itself."""
    path, length = write_recipe(tmp_path), 640 if family == "long" else 32
    text = path.read_text().replace("sequence_length: 32", f"sequence_length: {length}")
    text = text.replace("max_position_embeddings: 64", f"max_position_embeddings: {length}")
    if family == "gpt2":
        start, stop = text.index("model:"), text.index("data:")
        text = f"{text[:start]}model: {{kind: gpt2, n_embd: 32, n_layer: 2, n_head: 4, n_positions: 64}}\n{text[stop:]}"
    path.write_text(text.replace("global_batch_size: 8, micro_batch_size: 8", "global_batch_size: 2"))
    none = gradients(World(), str(path), ["memory.precision=fp32"])
    assert _same(none, gradients(World(), str(path), ["memory.precision=fp32", f"memory.recompute={kind}"]))


def draws(run: Run) -> None:
    """A part that draws random numbers where nobody knows of it."""
    torch.manual_seed(1)
    part = run.compute.model.get_submodule("blocks.0")
    mlp = next(module for name, module in part.named_modules() if name.endswith("mlp"))
    mlp.register_forward_hook(lambda module, given, made: made * (1 + 1e-6 * torch.rand_like(made)))


def remembers(run: Run) -> None:
    """A part whose result depends on how often it was asked."""
    part = run.compute.model.get_submodule("blocks.0")
    norm = next(module for name, module in part.named_modules() if name.endswith("mlp_norm"))
    asked = [0]

    def more(module: torch.nn.Module, given: object, made: torch.Tensor) -> torch.Tensor:
        asked[0] += 1
        return made * (1 + 1e-6 * asked[0])

    norm.register_forward_hook(more)


@pytest.mark.parametrize("fault", [draws, remembers])
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_hidden_randomness_and_state_are_caught(recipe: str, kind: str, fault: object) -> None:
    none = gradients(World(), recipe, [], fault)
    assert _same(none, gradients(World(), recipe, [], fault))
    assert apart(none, gradients(World(), recipe, [f"memory.recompute={kind}"], fault)) > 1e3 * EXACT
