"""Whole matrices, a rank's share of them each: rows are brought together, worked on, and given back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


class Exchange:
    """Gives work on whole matrices to the ranks over which `like` is cut (by rows) and copied.

    ranks: how many matrices are worked on at a time, one on each rank.
    """

    def __init__(self, like: Tensor) -> None:
        self.cut: dist.ProcessGroup | None = None
        self.copied: dist.ProcessGroup | None = None
        self.shards, self.copies, self.shard, self.copy = 1, 1, 0, 0
        if isinstance(like, DTensor):
            for axis, how in enumerate(like.placements):
                if like.device_mesh.size(axis) > 1:
                    self._take(like.device_mesh.get_group(axis), how)

    @property
    def ranks(self) -> int:
        return self.shards * self.copies

    def each(
        self, parts: Sequence[Tensor], shapes: Sequence[torch.Size], work: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """This rank's rows of work(whole matrix), of each of at most `ranks` matrices.

        parts: this rank's rows of each matrix; shapes: of the whole ones. The n-th is worked on by the n-th rank.
        """
        if self.ranks == 1:
            return [work(part) for part in parts]
        found: list[Tensor] = []
        for copy in range(self.copies):
            turn = slice(copy * self.shards, (copy + 1) * self.shards)
            mine, wholes = parts[turn], shapes[turn]
            if not mine:
                break
            done = self._work(mine, wholes, work) if copy == self.copy else None
            found += self._tell(done, mine, copy)
        return found

    def _take(self, group: dist.ProcessGroup, how: object) -> None:
        if not isinstance(how, Shard):
            assert self.copied is None, "weights are copied along one axis at most"
            self.copied, self.copies, self.copy = group, group.size(), group.rank()
        else:
            assert self.cut is None and how.dim == 0, "weights are cut by rows, along one axis at most"
            self.cut, self.shards, self.shard = group, group.size(), group.rank()

    def _work(
        self, parts: Sequence[Tensor], shapes: Sequence[torch.Size], work: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """The same, of at most as many matrices as there are ranks in a copy of the weights."""
        if self.cut is None:
            return [work(part) for part in parts]
        sent = torch.cat([part.reshape(-1) for part in parts])
        gives = [part.numel() for part in parts] + [0] * (self.shards - len(parts))
        mine = shapes[self.shard] if self.shard < len(shapes) else torch.Size((0, 0))
        takes = [rows * mine[1] for rows in _rows(mine[0], self.shards)]
        whole = sent.new_empty(sum(takes))
        _swap(whole, sent, takes, gives, self.cut)
        done = work(whole.view(mine)).reshape(-1) if whole.numel() else whole
        back = torch.empty_like(sent)
        _swap(back, done, gives, takes, self.cut)
        return [piece.view_as(part) for piece, part in zip(back.split(gives), parts)]

    def _tell(self, done: list[Tensor] | None, parts: Sequence[Tensor], copy: int) -> list[Tensor]:
        """What one copy of the weights has worked out, told to the others."""
        if self.copied is None:
            assert done is not None
            return done
        sizes = [part.numel() for part in parts]
        flat = torch.cat([one.reshape(-1) for one in done]) if done is not None else parts[0].new_empty(sum(sizes))
        dist.broadcast(flat, group=self.copied, group_src=copy)
        return [piece.view_as(part) for piece, part in zip(flat.split(sizes), parts)]


def _rows(rows: int, ranks: int) -> list[int]:
    """Rows on each rank, as torch cuts them: all alike, the last ones fewer or none."""
    most = -(-rows // ranks) if rows else 0
    return [max(0, min(most, rows - most * rank)) for rank in range(ranks)]


def _swap(into: Tensor, sent: Tensor, takes: list[int], gives: list[int], group: dist.ProcessGroup) -> None:
    dist.all_to_all_single(into, sent, output_split_sizes=takes, input_split_sizes=gives, group=group)
