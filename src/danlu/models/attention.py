"""Grouped-query causal attention (arXiv:2305.13245) through torch's fused kernels.

A packed document sees itself alone, on every path:

loop    each document by itself, causal (CPU, long rows; any device or dtype that varlen does not serve)
mask    one dense mask a forward, shared by the layers (CPU, short rows)
varlen  all documents in one call of the variable-length flash kernel (CUDA, half precision)
"""

from __future__ import annotations

from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from danlu.core.contracts import Cache
from danlu.models import blockwise
from danlu.models.linear import Float8Linear, linear
from danlu.models.product import Linear, product
from danlu.models.rope import Rotation, rotate
from danlu.models.shape import Shape

Path = Literal["mask", "loop", "varlen"]
# On two CPU cores, forward and backward, a mask took 1.0 to 1.6 times plain causal attention's time in rows of 256 and
# 512 tokens, where a call a document took 0.7 to 6.7 (worst in bf16); from 1,024 on a mask took 1.3 to 2.4, and the
# calls, which leave out what no document reads, 0.2 to 1.5.
MASK_UP_TO = 512


class Scope(NamedTuple):
    """Which positions each position may read; made once a forward, shared by the layers. All empty: plain causal.

    mask     [B or 1, 1, S, held + S]: bool, or as a kernel takes it, 0 and minus infinity
    lengths  of each document, over the rows laid end to end
    cuts     [documents + 1] int32, where each of them begins
    """

    mask: Tensor | None = None
    lengths: tuple[int, ...] = ()
    cuts: Tensor | None = None

    def added(self, dtype: torch.dtype) -> Scope:
        """The same with its mask as numbers that are added to scores, in the dtype that attention runs in.

        torch makes them of a bool mask at each call, and keeps each for the backward: one a layer.
        """
        if self.mask is None or self.mask.dtype != torch.bool:
            return self
        return self._replace(mask=torch.where(self.mask, 0.0, -torch.inf).to(dtype))


def choose(device: torch.device, dtype: torch.dtype, length: int) -> Path:
    """The path for packed rows of that length, in the dtype that attention runs in."""
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and not _before_flash(device):
        return "varlen"
    return "mask" if device.type == "meta" or (device.type == "cpu" and length <= MASK_UP_TO) else "loop"


def _before_flash(device: torch.device) -> bool:
    """Whether a GPU is older than the flash kernels (a V100, a T4)."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0)


def scope(documents: Tensor, *, packed: bool, held: int, new: int, path: Path) -> Scope:
    """What `new` positions may read after `held` cached ones, given the documents of all of them (or the new ones)."""
    if held or (packed and (path == "mask" or documents.shape[1] != new)):
        return Scope(mask=_mask(documents, packed=packed, held=held, new=new))
    if not packed:
        return Scope()
    flat = documents.flatten()
    begins = torch.ones_like(flat, dtype=torch.bool)
    begins[1:] = flat[1:] != flat[:-1]
    begins[:: documents.shape[1]] = True
    cuts = F.pad(begins.nonzero().flatten(), (0, 1), value=flat.numel())
    if path == "varlen":
        return Scope(cuts=cuts.to(torch.int32))
    return Scope(lengths=tuple(cuts.diff().tolist()))


def _mask(documents: Tensor, *, packed: bool, held: int, new: int) -> Tensor | None:
    if new == 1 and not packed:
        return None  # one token reads all that is held
    causal = torch.ones(new, held + new, dtype=torch.bool, device=documents.device).tril(held)
    if not packed:
        return causal[None, None]
    same = documents[:, None, -new:, None] == documents[:, None, None, :]
    return causal & same


def together(hidden: Tensor, *parts: nn.Linear) -> tuple[Tensor, ...]:
    """Each part of the same hidden states: one matrix product where the parts are plain, else one after the other.

    Parts that something has taken hold of (sharded weights, hooks, a graft in the place of one) are called as they are.
    """
    if not all(_plain(part) for part in parts) or len({type(part) for part in parts}) > 1:
        return tuple(part(hidden) for part in parts)
    weights: list[Tensor] = [part.weight for part in parts]
    biases: list[Tensor] = [part.bias for part in parts if part.bias is not None]
    bias = torch.cat(biases) if len(biases) == len(parts) else None
    multiply = linear if type(parts[0]) is Float8Linear else product
    return multiply(hidden, torch.cat(weights), bias).split([part.weight.shape[0] for part in parts], -1)


def _plain(part: nn.Module) -> bool:
    return (
        type(part) in (Linear, Float8Linear)
        and type(part.weight) is nn.Parameter
        and not part._forward_hooks
        and not part._forward_pre_hooks
        and not part._backward_hooks
        and not part._backward_pre_hooks
    )


class Attention(nn.Module):
    """Causal self-attention; queries in groups share keys and values. Right on any shard of the heads."""

    roles: ClassVar[dict[str, str]] = {"q": "column", "k": "column", "v": "column", "o": "row"}

    def __init__(self, shape: Shape, *, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, shape.head_dim
        queries, keys = shape.heads * shape.head_dim, shape.key_value_heads * shape.head_dim
        self.q = Linear(shape.hidden_size, queries, bias=shape.attention_bias)
        self.k = Linear(shape.hidden_size, keys, bias=shape.attention_bias)
        self.v = Linear(shape.hidden_size, keys, bias=shape.attention_bias)
        self.o = Linear(queries, shape.hidden_size, bias=shape.attention_bias)

    def forward(self, hidden: Tensor, turn: Rotation | None, seen: Scope, cache: Cache | None = None) -> Tensor:
        """Hidden states [B, S, D] to the same shape; `turn` rotates queries and keys, `seen` says who reads whom."""
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)) for part in together(hidden, self.q, self.k, self.v)
        )  # [B, S, heads, head_dim]
        if turn is not None:
            q, k = rotate(q, turn), rotate(k, turn)
        if cache is not None:
            keys, values = cache.append(self.layer, k.transpose(1, 2), v.transpose(1, 2))
            k, v = keys.transpose(1, 2), values.transpose(1, 2)
        return self.o(attend(q, k, v, seen).flatten(-2))


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Scope) -> Tensor:
    """Attention of q [B, S, H, d] over k and v [B, held + S, G, d], with H a multiple of G: [B, S, H, d]."""
    if seen.cuts is not None:
        return _varlen(q, k, v, seen.cuts)
    if seen.lengths:
        rows = zip(*(part.flatten(0, 1).split(seen.lengths) for part in (q, k, v)))
        return torch.cat([_fused(*(x[None] for x in row), causal=True)[0] for row in rows]).view(q.shape)
    if blockwise.fits(q, k, seen.mask):
        return blockwise.attend(q, k, v, seen.mask)
    return _fused(q, k, v, mask=seen.mask, causal=seen.mask is None and q.shape[1] > 1)


def _fused(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=causal,
        scale=q.shape[-1] ** -0.5,
        enable_gqa=q.shape[2] != k.shape[2],
    ).transpose(1, 2)


def _varlen(q: Tensor, k: Tensor, v: Tensor, cuts: Tensor) -> Tensor:
    longest = q.shape[1]  # no document is longer than its row; the true length would cost a wait for the device
    seen = varlen_attn(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        cu_seq_q=cuts,
        cu_seq_k=cuts,
        max_q=longest,
        max_k=longest,
        scale=q.shape[-1] ** -0.5,
        window_size=(-1, 0),
        enable_gqa=q.shape[2] != k.shape[2],
    )
    assert isinstance(seen, Tensor)
    return seen.view(q.shape)
