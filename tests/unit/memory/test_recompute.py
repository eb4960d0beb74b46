"""Which blocks recompute, what that costs in products, and what is said of it."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from danlu.core.batch import Batch
from danlu.memory.recompute import Kind, Recomputed, apply, saved, stretches
from danlu.models import product
from danlu.models.families.gpt2 import Gpt2
from danlu.models.families.llama import Llama
from danlu.models.stack import Trunk, plain
from danlu.models.start import fill

LAYERS, ROWS, LENGTH = 3, 2, 32
FAMILIES = {
    "llama": Llama(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=40,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
    ),
    "gpt2": Gpt2(vocab_size=50, n_embd=16, n_layer=LAYERS, n_head=4, n_positions=LENGTH),
}


def _model(family: str, kinds: tuple[Kind, ...]) -> Trunk:
    with torch.device("meta"):
        model = FAMILIES[family].build()
    apply(model, kinds)
    model.to_empty(device="cpu")
    fill(model, 1)
    return model


def _batch() -> Batch:
    tokens = torch.randint(50, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(LENGTH).repeat(ROWS, 1)
    return Batch(
        tokens=tokens, labels=tokens, positions=positions, documents=tokens * 0, packed=False, samples=("a", "b")
    )


def _flops(family: str, kind: Kind) -> tuple[int, int]:
    """Of the forward, and of the backward, as torch counts them."""
    model, batch = _model(family, (kind,) * LAYERS), _batch()
    with FlopCounterMode(display=False) as forward:
        hidden = model(batch.tokens, batch.positions, batch.documents, packed=False)
    with FlopCounterMode(display=False) as backward:
        hidden.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_computed_again(family: str) -> None:
    """Fully: every product of the blocks but the last of each, whose result nobody needs. Selectively: none."""
    shape = FAMILIES[family].shape()
    forward, backward = _flops(family, "none")
    last = 2 * ROWS * LENGTH * shape.inner_size * shape.hidden_size * LAYERS
    assert _flops(family, "selective") == (forward, backward)
    assert _flops(family, "full") == (forward, backward + forward - last)


def test_names_and_evaluation_are_the_blocks_own() -> None:
    kinds: tuple[Kind, ...] = ("full", "selective", "none")
    model, other = _model("llama", kinds), _model("llama", ("none",) * LAYERS)
    assert [type(block) is Recomputed for block in model.blocks.values()] == [True, True, False]
    named = {plain(name): weight for name, weight in model.named_parameters()}
    assert named.keys() == dict(other.named_parameters()).keys()
    batch = _batch()
    with torch.no_grad():
        ours, theirs = (m(batch.tokens, batch.positions, batch.documents, packed=False) for m in (model, other))
    assert torch.equal(ours, theirs)


def test_what_is_said() -> None:
    assert list(stretches(("none",) * 4)) == [("blocks 0 to 3", "none")]
    assert list(stretches(("full", "full", "selective", "none"))) == [
        ("blocks 0 to 1", "full"),
        ("block 2", "selective"),
        ("block 3", "none"),
    ]
    assert saved("selective") == "the input, matrix products, attention outputs"


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")
def test_products_by_onednn_are_kept_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the backward: of each of a block's four products the gradient of its states, and what is made again.

    Fully all are. Selectively the last alone, which is not kept: an operator of our own is made before it is known that
    nobody asks for its result.
    """
    monkeypatch.setattr(product, "ONEDNN", True)
    monkeypatch.setattr(product, "ROWS", 1)
    calls, multiply = [], product.multiply
    monkeypatch.setattr(product, "multiply", lambda *given: calls.append(True) or multiply(*given))
    for kind, again in (("selective", 1), ("full", 4)):
        model, batch = _model("llama", (kind,) * LAYERS), _batch()
        hidden = model(batch.tokens, batch.positions, batch.documents, packed=False)
        calls.clear()
        hidden.sum().backward()
        assert len(calls) == LAYERS * (4 + again)
