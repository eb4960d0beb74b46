"""The bytes that tensors really held, storage by storage: what the ledger's forecast is measured against."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FORWARD, BACKWARD = "forward", "backward"  # parts of what nobody has named: made outside, or inside, a backward


@dataclass(slots=True, eq=False)
class Piece:
    """One memory: whose it is, its bytes, which operator made it of which shape, and from and until when.

    Time is the number of the memory that was made last.
    """

    part: str
    bytes: int
    maker: str
    born: int
    died: int | None = None

    def alive(self, moment: int) -> bool:
        """Whether it was there when the memory of that number had just been made."""
        return self.born <= moment and (self.died is None or self.died >= moment)


class Tracker(TorchDispatchMode):
    """Inside it, every memory that an eager operator makes on this thread is counted, from its making to its end.

    Counted once a storage, however many tensors look at it. What a kernel takes and gives back within one operator is
    not seen, nor what compiled code makes. Memory that was there before is told of by ``hold``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.moment = 0  # the memory by which the peak was reached
        self._now = 0
        self._part = ""
        self._pieces: list[Piece] = []
        self._known: dict[int, tuple[weakref.ref[UntypedStorage], Piece]] = {}
        self._elastic: dict[int, weakref.ref[UntypedStorage]] = {}  # what FSDP empties and fills again, and the like

    def hold(self, part: str, tensors: Iterable[Tensor]) -> None:
        """These memories are of this part, since whenever they are there; those not seen before are counted now."""
        for tensor in tensors:
            storage = _plain(tensor).untyped_storage()
            known = self._known.get(storage._cdata)
            if known is None:
                self._count(storage, part, "held")
            else:
                known[1].part = part

    def parts(self) -> dict[str, int]:
        """Bytes by part at the peak, the largest first."""
        found: Counter[str] = Counter()
        for piece in self._pieces:
            if piece.alive(self.moment):
                found[piece.part] += piece.bytes
        return dict(found.most_common())

    def pieces(self) -> list[Piece]:
        """Every memory at the peak, the largest first."""
        return sorted((piece for piece in self._pieces if piece.alive(self.moment)), key=lambda piece: -piece.bytes)

    @contextmanager
    def within(self, parts: Mapping[str, nn.Module]) -> Iterator[None]:
        """What these modules' forwards make is counted under their names (unless it is named otherwise)."""
        hooks = []
        for name, module in parts.items():
            hooks.append(module.register_forward_pre_hook(lambda *_, name=name: setattr(self, "_part", name)))
            hooks.append(module.register_forward_hook(lambda *_: setattr(self, "_part", ""), always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def gradients(self, weights: Iterable[nn.Parameter]) -> Iterator[None]:
        """What is gathered in these weights' gradients is counted as that."""

        def seen(weight: Tensor) -> None:
            if weight.grad is not None:
                self.hold("gradients", [weight.grad])

        hooks = [weight.register_post_accumulate_grad_hook(seen) for weight in weights if weight.requires_grad]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind not in (Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # a tensor made of tensors: what it does to those is seen next
        gathers = func.namespace == "fsdp"
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                self._look(storage)
                if gathers:
                    self._elastic.setdefault(storage._cdata, weakref.ref(storage))
        for reference in list(self._elastic.values()):
            if (alive := reference()) is not None:
                self._look(alive)
        made = func(*args, **(kwargs or {}))
        inside = torch._C._current_graph_task_id() != -1
        part = BACKWARD if inside else self._part or FORWARD
        for value in tree_leaves(made):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in self._known:
                    self._count(storage, part, f"{func} {tuple(value.shape)}")
        return made

    def _count(self, storage: UntypedStorage, part: str, maker: str) -> None:
        self._now += 1
        key, piece = storage._cdata, Piece(part, storage.nbytes(), maker, self._now)
        self._pieces.append(piece)
        self._known[key] = weakref.ref(storage, partial(self._end, key, piece)), piece
        self._add(piece.bytes)

    def _look(self, storage: UntypedStorage) -> None:
        """A storage that has another size now is another memory: what was resized to nothing is gone."""
        known = self._known.get(storage._cdata)
        if known is not None and known[1].bytes != storage.nbytes():
            key, old = storage._cdata, known[1]
            self._elastic.setdefault(key, weakref.ref(storage))
            self._end(key, old)
            self._count(storage, old.part, old.maker)

    def _end(self, key: int, piece: Piece, _: object = None) -> None:
        if piece.died is None:
            piece.died = self._now
            self.live -= piece.bytes
        known = self._known.get(key)
        if known is not None and known[1] is piece:
            del self._known[key]

    def _add(self, size: int) -> None:
        self.live += size
        if self.live > self.peak:
            self.peak, self.moment = self.live, self._now


def _plain(tensor: Tensor) -> Tensor:
    """The tensor itself; of one that is cut over ranks, this rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
