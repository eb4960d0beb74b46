"""Attention in blocks of queries gives torch's, with its gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.models import attention, blockwise
from danlu.models.attention import Scope

HEADS, WIDTH = 4, 16


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def drawn(length: int, groups: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, and the gradient of what comes of them."""
    of = torch.Generator().manual_seed(length)
    heads = (HEADS, groups, groups, HEADS)
    return [torch.randn(2, length, count, WIDTH, generator=of, dtype=torch.float64).to(dtype) for count in heads]


def documents(length: int) -> Tensor:
    """A mask of rows packed with documents of 50 and 77 tokens in turn, as a kernel takes it."""
    number = (torch.arange(length) % 127 >= 50) + 2 * (torch.arange(length) // 127)
    mask = torch.ones(length, length, dtype=torch.bool).tril() & (number[:, None] == number)
    return torch.where(mask, 0.0, -torch.inf)[None, None].expand(2, 1, -1, -1)


def torchs(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True).transpose(
        1, 2
    )


def with_gradients(function: Any, given: list[Tensor], mask: Tensor | None) -> list[Tensor]:
    leaves = [part.clone().requires_grad_() for part in given[:3]]
    made = function(*leaves, mask)
    return [made, *torch.autograd.grad(made, leaves, given[3])]


@pytest.mark.parametrize("length", [129, 256, 300])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize(("packed", "rows"), [(False, 0), (True, 1), (True, 2)])
def test_equals_torchs_in_float64(length: int, groups: int, packed: bool, rows: int) -> None:
    """rows: that have a mask of their own; one: all have the same."""
    given = drawn(length, groups, torch.float64)
    mask = documents(length)[:rows].double() if packed else None
    ours, exact = with_gradients(blockwise.attend, given, mask), with_gradients(torchs, given, mask)
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return attention.attend(q, k, v, Scope(mask=mask))


@pytest.mark.parametrize("packed", [False, True])
def test_compiled_code_in_bf16_errs_about_as_much_as_torchs_kernel(packed: bool) -> None:
    """Against float64 of what was there before it was rounded to bf16: that rounding is most of either's error."""
    given, mask = drawn(256, 4, torch.float64), documents(256) if packed else None
    exact = with_gradients(torchs, given, None if mask is None else mask.double())
    low, added = [part.bfloat16() for part in given], None if mask is None else mask.bfloat16()
    ours = with_gradients(torch.compile(attend, backend="aot_eager", fullgraph=True), low, added)
    kernel = with_gradients(attend, low, added)
    for a, b, truth in zip(ours, kernel, exact, strict=True):
        assert not torch.equal(a, b)  # or it was the kernel's own
        assert (a - truth).abs().mean() <= 1.4 * (b - truth).abs().mean()


def test_compiled_groups_under_one_mask_for_all_rows() -> None:
    """Grouped keys and values, and a mask [1, 1, S, S], by the compiler's own code."""
    given, mask = drawn(200, 2, torch.bfloat16), documents(200)[:1].bfloat16()
    exact = with_gradients(torchs, [part.double() for part in given], mask.double())
    ours = with_gradients(torch.compile(attend, fullgraph=True), given, mask)
    for made, truth in zip(ours, exact, strict=True):
        assert (made - truth).abs().mean() <= 0.01 * truth.abs().mean()


@pytest.mark.parametrize(("length", "dtype"), [(128, torch.bfloat16), (1025, torch.bfloat16), (256, torch.float32)])
def test_other_rows_are_left_to_the_kernel(length: int, dtype: torch.dtype) -> None:
    given = drawn(length, 4, dtype)
    torch.testing.assert_close(torch.compile(attend, backend="aot_eager")(*given[:3], None), attend(*given[:3], None))
    found: list[bool] = []
    torch.compile(lambda q, k: found.append(blockwise.fits(q, k, None)) or q, backend="eager")(*given[:2])
    assert found == [False]
