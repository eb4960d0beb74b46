"""First weights: a pure function of seed and name, spread by role, cut without communication."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from danlu.core.world import World
from danlu.models import start
from danlu.models.families.llama import Llama
from tests.ranks import Ranks
from tests.unit.models.tiny import FAMILIES

# First four values of seed 1234, from a plain torch generator seeded with the first 8 bytes of
# blake2b("1234\\x1f" + name), little-endian, shifted right by one bit; times the standard deviation.
# Made by these words in a script of its own, without danlu, with torch 2.13 on x86-64 (AVX-512).
GOLDEN = {
    "embed.weight": [0.007105726, -0.008541542, 0.032782275, 0.044471033],
    "blocks.1.attention.o.weight": [0.00679021, 0.008784238, 0.006721361, 0.015853656],
}


def filled(name: str, seed: int = 1234) -> dict[str, torch.Tensor]:
    model = FAMILIES[name].build()
    start.fill(model, seed)
    return {key: value.detach() for key, value in model.named_parameters()}


def test_golden_values() -> None:
    values = filled("llama")
    for key, golden in GOLDEN.items():
        torch.testing.assert_close(values[key].flatten()[:4], torch.tensor(golden), atol=1e-7, rtol=0)


def test_values_depend_on_seed_and_name_alone() -> None:
    """Neither the global random state, nor the order, nor how many parameters there are, nor the wrappers' names."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = filled("llama")
    assert torch.equal(before, torch.get_rng_state())
    deeper = Llama(**{**vars(FAMILIES["llama"]), "num_hidden_layers": 3}).build()
    deeper.blocks["0"] = torch.nn.ModuleDict({"_orig_mod": deeper.blocks["0"]})  # as compiling a block names it
    start.fill(deeper, 1234)
    for key, value in deeper.named_parameters():
        key = key.replace("_orig_mod.", "")
        if key in first and not key.endswith(("o.weight", "down.weight")):  # these depend on the depth
            assert torch.equal(value, first[key]), key
    other = filled("llama", seed=1235)
    assert not torch.equal(first["embed.weight"], other["embed.weight"])
    assert not torch.equal(first["blocks.0.mlp.up.weight"], first["blocks.1.mlp.up.weight"])


def test_spread_is_that_of_the_role() -> None:
    family = Llama(
        vocab_size=500, hidden_size=128, num_hidden_layers=8, intermediate_size=256, num_attention_heads=4,
        attention_bias=True, tie_word_embeddings=False, initializer_range=0.05,
    )  # fmt: skip
    model = family.build()
    start.fill(model, 0)
    for name, value in model.named_parameters():
        if "norm" in name:
            assert (value == 1).all(), name
        elif name.endswith("bias"):
            assert (value == 0).all(), name
        else:
            wanted = 0.05 / math.sqrt(16) if name.endswith(("o.weight", "down.weight")) else 0.05
            bound = 5 / math.sqrt(2 * value.numel())  # five standard errors
            assert abs(value.std().item() / wanted - 1) < bound, name
            assert abs(value.mean().item()) < 5 * wanted / math.sqrt(value.numel()), name


def test_a_layer_norm_starts_at_one_and_zero() -> None:
    for key, value in filled("gpt2").items():
        if "norm" in key:
            assert (value == float(key.endswith("weight"))).all(), key


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_hold_the_same_draw(dtype: torch.dtype) -> None:
    model, wanted = FAMILIES["gpt2"].build().to(dtype), filled("gpt2")
    start.fill(model, 1234)
    for key, value in model.named_parameters():
        assert torch.equal(value, wanted[key].to(dtype)), key


def test_a_tie_survives_meta() -> None:
    with torch.device("meta"):
        model = FAMILIES["llama"].build()
    assert all(parameter.is_meta for parameter in model.parameters())
    model = model.to_empty(device="cpu").double()
    start.fill(model, 1234)
    assert model.heads["language"].weight is model.embed.weight
    assert "heads.language.weight" not in dict(model.named_parameters())


def _parts(world: World) -> list[bool]:
    mesh = init_device_mesh("cpu", (world.size,))
    whole = torch.randn(5, 6, generator=torch.Generator().manual_seed(world.rank))
    agreed = []
    for dim in (0, 1):
        held = distribute_tensor(torch.zeros(5, 6), mesh, [Shard(dim)])
        start.put(held, whole)
        assert isinstance(held, DTensor)
        cut = whole.chunk(world.size, dim)[world.rank]
        agreed.append(torch.equal(held.to_local(), cut))
    return agreed


def test_a_rank_keeps_its_own_part(ranks: Ranks) -> None:
    """Each rank hands over another tensor here: a part that came from a peer would show."""
    assert ranks.run(_parts, size=2) == [[True, True], [True, True]]
