"""The trunk: one code for precisions, cuts and wrappers."""

from __future__ import annotations

import pytest
import torch

from danlu.models.stack import plain
from tests.unit.models.tiny import FAMILIES, VOCABULARY, alone, lively, row

TOKENS = torch.randint(VOCABULARY, (2, 30), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("name", FAMILIES)
def test_autocast_stays_near_fp32_in_value_and_gradient(name: str) -> None:
    model = lively(FAMILIES[name])
    results = []
    for on in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            hidden = model(TOKENS, *alone(TOKENS))
            loss = model.heads["language"].nll(hidden, TOKENS.roll(-1, 1)) / TOKENS.numel()
            loss.backward()
        results.append((loss, torch.cat([p.grad.flatten() for p in model.parameters()])))
    (exact, wanted), (near, got) = results
    assert abs(near / exact - 1) < 0.02
    assert torch.nn.functional.cosine_similarity(wanted, got, dim=0) > 0.99
    assert got.dtype == torch.float32


@pytest.mark.parametrize("name", FAMILIES)
def test_float64_is_float64_to_the_end(name: str) -> None:
    """A part that fell to fp32 would differ from itself run at other orders of size by more than 1e-12."""
    model = lively(FAMILIES[name], torch.float64)
    tokens, positions, documents = row([9, 14])
    values = []
    for path in ("mask", "loop"):
        model.path = path
        values.append(model(tokens, positions, documents))
    assert values[0].dtype == torch.float64
    torch.testing.assert_close(*values, atol=1e-13, rtol=0)
    single = lively(FAMILIES[name])(tokens, positions, documents)
    assert 1e-8 < (values[0] - single).abs().max() < 1e-4


def test_no_buffer_can_be_cast_or_saved() -> None:
    for family in FAMILIES.values():
        assert not list(family.build().buffers())


def test_a_trunk_cut_in_two_equals_the_whole() -> None:
    """Each half without what the other holds: blocks keep their names, hidden states go between."""
    family = FAMILIES["llama"]
    whole, head, tail = (lively(family) for _ in range(3))
    head.norm = None
    del head.blocks["1"]
    tail.embed = None
    del tail.blocks["0"]
    assert "blocks.1.attention.q.weight" in dict(tail.named_parameters())
    positions, documents = alone(TOKENS)
    between = head(TOKENS, positions, documents)
    assert torch.equal(tail(between, positions, documents), whole(TOKENS, positions, documents))


def test_names_do_not_show_wrappers() -> None:
    assert plain("blocks.0._orig_mod.attention.q.weight") == "blocks.0.attention.q.weight"
    assert plain("_orig_mod.blocks.0._checkpoint_wrapped_module.mlp.up.weight") == "blocks.0.mlp.up.weight"


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_recomputed_block_gives_bit_equal_gradients(name: str) -> None:
    gradients = []
    for recompute in (False, True):
        model = lively(FAMILIES[name])
        if recompute:
            for key, block in model.blocks.items():
                model.blocks[key] = _Recomputed(block)
        model(TOKENS, *alone(TOKENS)).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


class _Recomputed(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: object) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.inner, *inputs, use_reentrant=False)
