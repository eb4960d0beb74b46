"""Activations that are not kept for the backward but computed again in it.

full       a block keeps its input, and runs its forward once more in the backward (Chen et al. 2016, arXiv:1604.06174)
selective  a block keeps its input and what is dear to compute, SAVED; the rest is cheap and computed again
           (Korthikanti et al. 2022, arXiv:2205.05198, section 5)

Blocks draw no random numbers and keep no state, so that a second forward gives the first one's bits; no random state is
therefore kept or put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from danlu.core.config import setting
from danlu.models.product import OPERATOR as PRODUCT
from danlu.models.shape import Shape
from danlu.models.stack import Trunk

Kind = Literal["none", "selective", "full"]
KINDS: tuple[Kind, ...] = ("none", "selective", "full")  # from the most bytes kept to the fewest

_aten, _own = torch.ops.aten, getattr(torch.ops, "torch_attn", None)
# What selective recomputation keeps of a block, besides its input. All else (norms, rotations, activations, products
# of numbers, sums) is computed again; so is attention where it is made by batched products: its scores are too many.
SAVED: Mapping[str, tuple[Any, ...]] = {
    "matrix products": (
        _aten.mm.default,
        _aten.addmm.default,
        _aten._scaled_mm.default,
        PRODUCT,
    ),
    "attention outputs": (
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        *((_own._varlen_attn.default,) if _own is not None and hasattr(_own, "_varlen_attn") else ()),
    ),
}
_DEAR = frozenset(op for ops in SAVED.values() for op in ops)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Recompute as little as keeps the activations within a share of what they would be."""

    budget: float = setting(0.5, "share of the activations' bytes that is kept: 1 keeps all", at_least=0, at_most=1)


Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]  # of the forward, and of its repetition
Recompute = Literal["none", "selective", "full"] | Budget


class Recomputed(nn.Module):
    """A block that keeps less for its backward than autograd would, and computes it again there.

    Values and gradients are the block's own, to the bit. Without gradients it is the block.
    """

    def __init__(self, block: nn.Module, contexts: Callable[[], Contexts] = noop_context_fn) -> None:
        super().__init__()
        self._checkpoint_wrapped_module = block
        self.contexts = contexts

    def forward(self, *inputs: Any) -> Tensor:
        """What the block gives."""
        block = self._checkpoint_wrapped_module
        if not torch.is_grad_enabled():
            plain: Tensor = block(*inputs)
            return plain
        # The compiler knows a checkpoint that is given no contexts, and not one that is given none in particular.
        more: dict[str, Any] = {} if self.contexts is noop_context_fn else {"context_fn": self.contexts}
        made: Tensor = checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False, **more)
        return made


def apply(model: Trunk, kinds: Sequence[Kind]) -> None:
    """Each block recomputes as its kind says, the first block's first; names of weights are the same (see `plain`)."""
    contexts = partial(create_selective_checkpoint_contexts, partial(_policy, last_product(model.shape)))
    for (name, block), kind in zip(list(model.blocks.items()), kinds, strict=True):
        if kind != "none":
            model.blocks[name] = Recomputed(block, contexts if kind == "selective" else noop_context_fn)


def stretches(kinds: Sequence[Kind]) -> Iterator[tuple[str, Kind]]:
    """Blocks beside each other that are of one kind, in words, and the kind."""
    start = 0
    for kind, run in groupby(kinds):
        count = len(list(run))
        yield (f"blocks {start} to {start + count - 1}" if count > 1 else f"block {start}"), kind
        start += count


def saved(kind: Kind) -> str:
    """What such a block keeps for its backward, in words."""
    return {"none": "all", "full": "the input", "selective": f"the input, {', '.join(SAVED)}"}[kind]


def last_product(shape: Shape) -> tuple[int, int]:
    """The factor of a block's last matrix product, (inner, hidden): its result is never asked for again."""
    return shape.inner_size, shape.hidden_size


def _policy(last: tuple[int, int], context: Any, operator: Any, *inputs: Any, **named: Any) -> CheckpointPolicy:
    """Whether an operator's result is kept."""
    if operator not in _DEAR:
        return CheckpointPolicy.PREFER_RECOMPUTE
    if operator in SAVED["matrix products"] and _factor(operator, inputs) == last:
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


def _factor(operator: Any, inputs: tuple[Any, ...]) -> tuple[int, ...]:
    """The shape [in, out] of what a product multiplies by."""
    if operator is PRODUCT:
        out, inner = inputs[1].shape
        return inner, out
    factors = [tuple(value.shape) for value in inputs[1:] if isinstance(value, Tensor)]
    return factors[-1] if factors else ()
