"""What a compiled block keeps for its backward on a CPU, and what it makes again there: the compiler's own graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from danlu.compute.compile import Compiled
from danlu.memory.recompute import Kind, apply
from danlu.models import product
from danlu.models.attention import Scope
from danlu.models.families.gpt2 import Gpt2
from danlu.models.families.llama import Llama
from danlu.models.rope import rotation
from danlu.models.start import fill

HIDDEN, HEADS, INNER = 32, 2, 96
LLAMA = Llama(
    vocab_size=64,
    hidden_size=HIDDEN,
    num_hidden_layers=1,
    num_attention_heads=HEADS,
    num_key_value_heads=HEADS,
    intermediate_size=INNER,
    max_position_embeddings=512,
)
SIZES = {"vocab_size": 64, "n_embd": HIDDEN, "n_layer": 1, "n_head": HEADS, "n_positions": 512}
GPT2, RELU = Gpt2(**SIZES), Gpt2(**SIZES, activation_function="relu")
PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "danlu.product.default")
ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Graphs:
    """The graphs of a block's forward and backward, as its code would be made of them."""

    def __init__(
        self, family: Any, *, low: bool, rows: int, length: int, again: bool = True, recompute: Kind = "none"
    ) -> None:
        made: list[fx.GraphModule] = []
        backend = aot_autograd(
            fw_compiler=lambda graph, inputs: made.append(graph) or graph,
            bw_compiler=lambda graph, inputs: made.append(graph) or graph,
            partition_fn=min_cut_rematerialization_partition,
        )
        model = family.build()
        fill(model, 0)
        apply(model, (recompute,))
        Compiled(model.blocks.values(), say=lambda text: None, again=again, backend=backend)
        hidden = torch.randn(rows, length, HIDDEN, generator=torch.Generator().manual_seed(0), requires_grad=True)
        dtype = torch.bfloat16 if low else torch.float32
        turn = rotation(torch.arange(length)[None], head_dim=HIDDEN // HEADS, theta=1e4, dtype=dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            out = model.blocks["0"](hidden, turn if family is LLAMA else None, Scope())
        self.gradients = torch.autograd.grad(out.square().sum(), [hidden, *model.blocks.parameters()])
        self.forward, self.backward = made

    def calls(self, graph: fx.GraphModule) -> Counter[str]:
        """How often each operator is called."""
        return Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function")

    def kept(self) -> list[torch.Tensor]:
        """What the forward gives besides its result and its inputs."""
        results = next(node for node in self.forward.graph.nodes if node.op == "output").args[0]
        return [node.meta["val"] for node in results[1:] if isinstance(node, fx.Node) and node.op != "placeholder"]


@pytest.mark.parametrize(
    ("family", "low", "rows", "length"),
    [(LLAMA, True, 2, 64), (LLAMA, False, 8, 64), (GPT2, True, 1, 40), (GPT2, True, 8, 64), (RELU, True, 2, 64)],
)
def test_no_product_and_no_attention_is_made_twice(
    family: Any, low: bool, rows: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each product of the forward has two in the backward: by its states, and by its weight."""
    monkeypatch.setattr(product, "ONEDNN", torch.backends.mkldnn.is_available())
    graphs = Graphs(family, low=low, rows=rows, length=length)
    forward, backward = graphs.calls(graphs.forward), graphs.calls(graphs.backward)
    assert forward[ATTENTION] == 1 and backward[ATTENTION] == 0
    assert sum(backward[name] for name in PRODUCTS) == 2 * sum(forward[name] for name in PRODUCTS)
    assert sum(forward[name] for name in PRODUCTS) == 4  # q, k and v; what they give; gate and up; what those give


def test_what_is_cheap_is_made_again() -> None:
    """At least the product of gate and up, and the norms, are not kept; the gradients are the same to the bit."""
    sizes = {"low": False, "rows": 2, "length": 64}
    plain, lean = (Graphs(LLAMA, again=again, **sizes) for again in (False, True))
    kept = [sum(part.nbytes for part in graphs.kept()) for graphs in (plain, lean)]
    assert kept[1] <= kept[0] - 2 * 64 * (INNER + HIDDEN) * 4
    assert all(torch.equal(a, b) for a, b in zip(plain.gradients, lean.gradients, strict=True))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_attention_in_blocks_keeps_no_scores(recompute: Kind) -> None:
    """The largest that is kept is what gate and up give; scores of one block of queries are larger."""
    graphs = Graphs(LLAMA, low=True, rows=2, length=512, again=recompute == "none", recompute=recompute)
    assert graphs.calls(graphs.forward)[ATTENTION] == 0
    assert max((part.numel() for part in graphs.kept()), default=0) <= 2 * 512 * 2 * INNER < 2 * HEADS * 128 * 512
