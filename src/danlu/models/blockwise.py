"""Causal attention in blocks of queries, for compiled code on a CPU (formulas: Dao et al. 2022, arXiv:2205.14135).

torch's fused kernel multiplies small tiles, which costs most of its time in bf16. Batched products of larger blocks,
with all between them fused by the compiler, take about half of it (LOG.md). Softmax is made in fp32, of products in the
low dtype; the kernel keeps scores in fp32 too.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor

QUERIES = 128  # in a block; each block reads the keys up to its own last
UP_TO = 1024  # tokens of a row: with more, the kernel's tiles no longer lose, and code grows with the number of blocks


def serves(device: torch.device, dtype: torch.dtype, length: int) -> bool:
    """Whether compiled attention of rows of that length is made in blocks: where that was measured to be faster."""
    return device.type == "cpu" and dtype == torch.bfloat16 and QUERIES < length <= UP_TO


def fits(q: Tensor, k: Tensor, mask: Tensor | None) -> bool:
    """Whether this attention of q over k [B, S, heads, d] is made in blocks."""
    return (
        torch.compiler.is_compiling()
        and serves(q.device, q.dtype, q.shape[1])
        and (mask is None or mask.dtype == q.dtype)  # as it is added to scores
        and q.shape[1] == k.shape[1]
    )


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of q [B, S, H, d] over k and v [B, S, G, d], with H a multiple of G: [B, S, H, d].

    mask [B or 1, 1, S, S] is added to scores, and says all that may be read, never what comes later; None: causal.
    """
    rows, length, heads, _ = q.shape
    groups = heads // k.shape[2]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    q, k, v = (part.transpose(1, 2).flatten(0, 1) for part in (q, k, v))
    made: Tensor = _Blockwise.apply(q, k, v, mask)[0]
    return made.view(rows, heads, length, -1).transpose(1, 2)


class _Blockwise(torch.autograd.Function):
    """q, k, v [B·H, S, d] to the output, and its log-sum-exp [B·H, S, 1]; scores are made again in the backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        scale, exact = q.shape[-1] ** -0.5, _exact(q)
        out, log_sums = [], []
        for block, seen in _blocks(q.shape[1]):
            product = torch.bmm(q[:, block], k[:, seen].transpose(1, 2)).to(exact)
            scores = _hidden(product * scale, mask, block, seen)
            most = scores.amax(-1, keepdim=True)
            weights = torch.exp(scores - most)
            total = weights.sum(-1, keepdim=True)
            out.append(torch.bmm((weights / total).to(q.dtype), v[:, seen]))
            log_sums.append(most + total.log())
        made, log_sum = torch.cat(out, 1), torch.cat(log_sums, 1)
        ctx.mark_non_differentiable(log_sum)
        ctx.save_for_backward(q, k, v, made, log_sum)
        ctx.mask = mask
        return made, log_sum

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, made, log_sum = ctx.saved_tensors
        scale, exact = q.shape[-1] ** -0.5, _exact(q)
        centre, log_sum = (made.to(exact) * gradient).sum(-1)[:, None], log_sum.transpose(1, 2)
        by_q, by_k, by_v = [], [], []
        # All is made transposed, keys by queries: of the same product as in the forward the compiler would make one,
        # and keep scores from there to here.
        for block, seen in _blocks(q.shape[1]):
            product = torch.bmm(k[:, seen], q[:, block].transpose(1, 2)).to(exact)
            scores = _hidden(product * scale, ctx.mask, block, seen, turned=True)
            weights = torch.exp(scores - log_sum[:, :, block])
            by_weights = torch.bmm(v[:, seen], gradient[:, block].transpose(1, 2)).to(exact)
            by_scores = (weights * (by_weights - centre[:, :, block]) * scale).to(q.dtype)
            by_q.append(torch.bmm(by_scores.transpose(1, 2), k[:, seen]))
            by_k.append(torch.bmm(by_scores, q[:, block]))
            by_v.append(torch.bmm(weights.to(q.dtype), gradient[:, block]))
        return torch.cat(by_q, 1), _gathered(by_k), _gathered(by_v), None


def _blocks(length: int) -> list[tuple[slice, slice]]:
    """Each block's queries, and the keys that they may read."""
    starts = range(0, length, QUERIES)
    return [(slice(start, min(start + QUERIES, length)), slice(0, min(start + QUERIES, length))) for start in starts]


def _hidden(scores: Tensor, mask: Tensor | None, block: slice, seen: slice, *, turned: bool = False) -> Tensor:
    """Scores [B·H, queries, keys], minus infinity where nothing may be read; turned: they are [B·H, keys, queries]."""
    if mask is None:
        places = torch.arange(seen.stop, device=scores.device)
        read = places <= places[block, None]
        return torch.where(read.t() if turned else read, scores, -torch.inf)
    added = mask[:, :, block, seen]
    by_row = scores.view(mask.shape[0], -1, *scores.shape[1:]) + (added.transpose(2, 3) if turned else added)
    return by_row.view(scores.shape)


def _gathered(parts: list[Tensor]) -> Tensor:
    """Sums of what each block adds to the keys that it read, which begin at the first."""
    pieces = []
    for n in range(len(parts)):
        places = slice(n * QUERIES, parts[n].shape[1])
        added = [part[:, places].to(_exact(part)) for part in parts[n:]]
        pieces.append(reduce(torch.add, added))
    return torch.cat(pieces, 1).to(parts[0].dtype)


def _exact(of: Tensor) -> torch.dtype:
    """What softmax and sums are made in."""
    return torch.promote_types(of.dtype, torch.float32)
