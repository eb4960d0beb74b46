"""The trunk: embedding, blocks, last norm. Gives hidden states; heads turn them into scores."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from danlu.core.contracts import Cache
from danlu.models.attention import Attention, Path, Scope, choose, scope
from danlu.models.heads import LanguageHead
from danlu.models.mlp import Mlp
from danlu.models.norm import Norm, working_dtype
from danlu.models.rope import Rotation, rotation
from danlu.models.shape import Shape

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


class Block(nn.Module):
    """Attention, then feed-forward, each on normalised states and added to the stream."""

    def __init__(self, shape: Shape, *, layer: int) -> None:
        super().__init__()
        self.attention_norm = Norm(shape.hidden_size, kind=shape.norm, eps=shape.eps)
        self.attention = Attention(shape, layer=layer)
        self.mlp_norm = Norm(shape.hidden_size, kind=shape.norm, eps=shape.eps)
        self.mlp = Mlp(shape)

    def forward(self, hidden: Tensor, turn: Rotation | None, seen: Scope, cache: Cache | None = None) -> Tensor:
        """Hidden states [B, S, D] to the same shape."""
        hidden = hidden + self.attention(self.attention_norm(hidden), turn, seen, cache)
        return hidden + self.mlp(self.mlp_norm(hidden))


class Trunk(nn.Module):
    """A causal decoder up to its last hidden states. Parameters are made empty, for `start.fill`
    or `weights.copy` to fill.

    `heads` can score the hidden states, by name: "language".
    Cut for a pipeline, `embed` and `norm` are None where another stage holds them, `tokens` are then hidden states,
    and `blocks` keeps the names of the blocks it has. `path` overrides how packed rows are attended to; `attends_in`
    says in which dtype attention runs, where that is not what is worked in elsewhere.
    """

    roles: ClassVar[dict[str, str]] = {"embed": "vocab"}

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.path: Path | None = None
        self.attends_in: torch.dtype | None = None
        # Through meta, where torch's own first draw costs nothing: it would touch the global random state.
        device = torch.empty(0).device
        with torch.device("meta"):
            embed = nn.Embedding(shape.vocab_size, shape.hidden_size)
            self.embed: nn.Embedding | None = embed
            learned = shape.positions == "learned"
            self.places = nn.Embedding(shape.max_positions, shape.hidden_size) if learned else None
            self.blocks = nn.ModuleDict({str(n): Block(shape, layer=n) for n in range(shape.layers)})
            self.norm: Norm | None = Norm(shape.hidden_size, kind=shape.norm, eps=shape.eps)
            table = embed.weight
            assert isinstance(table, nn.Parameter)
            head = LanguageHead(shape.hidden_size, shape.vocab_size, weight=table if shape.tied else None)
            self.heads = nn.ModuleDict({"language": head})
        if device.type != "meta":
            self.to_empty(device=device)

    def forward(
        self, tokens: Tensor, positions: Tensor, documents: Tensor, packed: bool = True, cache: Cache | None = None
    ) -> Tensor:
        """The last hidden states [B, S, D] of tokens, positions and documents [B, S] (see `Batch`).

        packed=False promises one document a row. With a cache the tokens follow those that it holds; packed rows then
        need the documents of those too, [B, held + S].
        """
        hidden = tokens if self.embed is None else self.embed(tokens)
        if self.places is not None:
            hidden = hidden + self.places(positions)
        dtype = self.attends_in or working_dtype(hidden)
        turn = None
        if self.shape.positions == "rope":
            turn = rotation(positions, head_dim=self.shape.head_dim, theta=self.shape.theta, dtype=dtype)
        held, new = 0 if cache is None else cache.length, positions.shape[1]
        path = self.path or choose(hidden.device, dtype, new)
        seen = scope(documents, packed=packed, held=held, new=new, path=path).added(dtype)
        for block in self.blocks.values():
            hidden = block(hidden, turn, seen, cache)
        return hidden if self.norm is None else self.norm(hidden)

    def _apply(self, fn: Any, recurse: bool = True) -> Trunk:
        """Moves and casts as ever, then ties again what was tied: a move off meta makes every parameter anew."""
        super()._apply(fn, recurse)
        if self.shape.tied and self.embed is not None and "language" in self.heads:
            self.heads["language"].weight = self.embed.weight
        return self


def plain(name: str) -> str:
    """A parameter's name without what compiling, recomputing or sharding a module puts in front of its own."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
