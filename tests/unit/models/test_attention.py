"""Packed documents are alone on every path; caches continue; nothing is NaN; shards of heads are right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from danlu.models import attention
from danlu.models.attention import Attention, Scope, attend, choose, scope, together
from danlu.models.product import Linear
from tests.unit.models.tiny import FAMILIES, alone, lively, row

PATHS: list[attention.Path] = ["mask", "loop"]  # varlen runs on CUDA alone


def plain_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    """The formula, one position at a time: softmax(q k / sqrt(d)) v over what may be read."""
    out = torch.empty_like(q)
    group = q.shape[2] // k.shape[2]
    for b in range(q.shape[0]):
        for s in range(q.shape[1]):
            may = [t for t in range(s + 1) if documents[b, t] == documents[b, s]]
            for h in range(q.shape[2]):
                keys, values = k[b, may, h // group], v[b, may, h // group]
                weight = (keys @ q[b, s, h] / q.shape[-1] ** 0.5).softmax(0)
                out[b, s, h] = weight @ values
    return out


@pytest.mark.parametrize("path", PATHS)
def test_attention_equals_its_formula(path: attention.Path) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 9, heads, 4, dtype=torch.float64, generator=draw) for heads in (4, 2, 2))
    documents = torch.tensor([[0] * 4 + [1] * 5, [0, 1, 1, 2, 3, 3, 3, 3, 3]])
    seen = scope(documents, packed=True, held=0, new=9, path=path)
    wanted = plain_attention(q, k, v, documents)
    torch.testing.assert_close(attend(q, k, v, seen), wanted, atol=1e-12, rtol=0)
    whole = plain_attention(q, k, v, torch.zeros_like(documents))
    torch.testing.assert_close(attend(q, k, v, Scope()), whole, atol=1e-12, rtol=0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_packed_document_is_as_if_alone(name: str, path: attention.Path) -> None:
    model = lively(FAMILIES[name])
    model.path = path
    tokens, positions, documents = row([13, 1, 22, 4])
    packed = model(tokens, positions, documents)
    for document in range(4):
        here = documents[0] == document
        by_itself = tokens[:, here]
        torch.testing.assert_close(packed[:, here], model(by_itself, *alone(by_itself), False), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("path", PATHS)
def test_changing_one_document_leaves_its_neighbours_bit_equal(path: attention.Path) -> None:
    model = lively(FAMILIES["llama"])
    model.path = path
    tokens, positions, documents = row([20, 30])
    other = tokens.clone()
    other[:, :20] = (other[:, :20] + 1) % 101
    before, after = (model(t, positions, documents) for t in (tokens, other))
    assert torch.equal(before[:, 20:], after[:, 20:])
    assert not torch.allclose(before[:, :20], after[:, :20])


@pytest.mark.parametrize("path", PATHS)
def test_rows_of_padding_give_no_nan_and_add_nothing(path: attention.Path) -> None:
    model = lively(FAMILIES["llama"])
    model.path = path
    tokens, positions, documents = row([10, 6])
    labels = tokens.roll(-1, 1)

    def gradient(*batch: Tensor) -> Tensor:
        model.zero_grad()
        hidden = model(*batch[:3])
        assert hidden.isfinite().all()
        model.heads["language"].nll(hidden, batch[3]).backward()
        parameters = [p.grad.flatten() for p in model.parameters()]
        assert all(g.isfinite().all() for g in parameters)
        return torch.cat(parameters)

    zeros = torch.zeros_like(tokens)
    padded = [torch.cat(pair) for pair in ((tokens, zeros), (positions, zeros), (documents, zeros))]
    wanted = gradient(tokens, positions, documents, labels)
    got = gradient(*padded, torch.cat((labels, torch.full_like(labels, -100))))
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


class Held:
    """The simplest cache."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def length(self) -> int:
        return self.layers[0][0].shape[2] if self.layers else 0

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self.layers:
            keys, values = (torch.cat(pair, 2) for pair in zip(self.layers[layer], (keys, values)))
        self.layers[layer] = keys, values
        return keys, values


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_reading_in_pieces_with_a_cache_equals_reading_at_once(name: str, packed: bool) -> None:
    model = lively(FAMILIES[name])
    tokens, positions, documents = row([8, 17] if packed else [25])
    whole = model(tokens, positions, documents, packed)
    cache, pieces, at = Held(), [], 0
    for size in (7, 1, 5, 1, 1, 10):
        new = slice(at, at + size)
        at += size
        pieces.append(model(tokens[:, new], positions[:, new], documents[:, :at], packed, cache))
    torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=2e-6, rtol=1e-5)


def test_half_of_the_heads_are_right_by_themselves() -> None:
    """Two shards of a column-row pair add up to the whole: what tensor parallelism will lean on."""
    shape = FAMILIES["llama"].shape()
    whole = lively(FAMILIES["llama"]).blocks["0"].attention
    hidden = torch.randn(2, 6, shape.hidden_size, generator=torch.Generator().manual_seed(3))
    total = torch.zeros_like(hidden)
    for half in (0, 1):
        part = Attention(shape, layer=0)
        for name, role in Attention.roles.items():
            linear, axis = getattr(part, name), 0 if role == "column" else 1
            linear.weight = torch.nn.Parameter(getattr(whole, name).weight.chunk(2, axis)[half])
        total += part(hidden, None, Scope())
    torch.testing.assert_close(total, whole(hidden, None, Scope()), atol=1e-6, rtol=1e-5)


def test_hooked_parts_are_called_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [Linear(4, n) for n in (3, 2)]
    hidden = torch.randn(5, 4)
    products, kept = [], attention.product
    monkeypatch.setattr(attention, "product", lambda *given: products.append(True) or kept(*given))
    fused = together(hidden, *parts)
    assert products == [True]
    called = []
    parts[1].register_forward_hook(lambda *_: called.append(True))
    single = together(hidden, *parts)
    assert called == [True] and products == [True]
    for a, b in zip(fused, single):
        torch.testing.assert_close(a, b)


def test_the_path_follows_device_dtype_and_length(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert [choose(cpu, torch.float32, length) for length in (512, 1024)] == ["mask", "loop"]
    assert choose(cuda, torch.bfloat16, 512) == "varlen"
    assert choose(cuda, torch.float32, 512) == "loop"  # never a dense mask there
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, path in (((7, 5), "loop"), ((8, 0), "varlen")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert choose(cuda, torch.float16, 512) == path
