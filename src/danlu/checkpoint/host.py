"""Copies of tensors in the host's memory: made by several threads, in room that is kept from one save to the next."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from danlu.checkpoint.shard import view_bytes
from danlu.checkpoint.threads import in_shares

PIECE = 8 << 20  # bytes that are copied or touched at once
PAGE = 4096

Wanted = tuple[torch.Size, torch.dtype, bool]  # shape, type, whether it is copied from an accelerator


class Copies:
    """Room for copies of tensors, as much as the tensors take.

    The system makes fresh memory ready when it is first touched, which takes longer than the copy; so ``reserve``
    touches it beforehand, beside training.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}
        self._reserving: threading.Thread | None = None
        self._enough = threading.Event()

    @property
    def reserved(self) -> bool:
        """Whether there is room, or will soon be."""
        return bool(self._kept) or self._reserving is not None

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """There will soon be room for tensors like these."""
        self._settle()
        wanted = _wanted(tensors)

        def work() -> None:
            rooms = self._make(wanted)
            for piece in _cut(view_bytes(room) for name, room in rooms.items() if not wanted[name][2]):
                if self._enough.is_set():
                    return
                np.frombuffer(piece, np.uint8)[::PAGE] = 0

        self._reserving = threading.Thread(target=work, name="danlu room", daemon=True)
        self._reserving.start()

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of the tensors, in the place of those that were given before."""
        self._settle()
        rooms = self._make(_wanted(tensors))
        plain: list[tuple[memoryview, memoryview]] = []
        for name, tensor in tensors.items():
            if tensor.is_cpu and tensor.is_contiguous():
                plain.append((view_bytes(rooms[name]), view_bytes(tensor.detach())))
            else:
                rooms[name].copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        # Plain memory to memory, by threads of our own. Torch's own copy wakes all its threads for every tensor, which
        # on a machine with other work took up to forty times as long.
        pieces = list(zip(_cut(here for here, _ in plain), _cut(there for _, there in plain), strict=True))
        list(in_shares(_copy, pieces, size=lambda piece: len(piece[0])))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return rooms

    def _settle(self) -> None:
        """Nobody makes or touches room any more."""
        if self._reserving is not None:
            self._enough.set()
            self._reserving.join()
            self._reserving = None
            self._enough.clear()

    def _make(self, wanted: Mapping[str, Wanted]) -> dict[str, Tensor]:
        """Room for each, the old one where it fits."""
        kept, self._kept = self._kept, {}
        for name, (shape, dtype, pinned) in wanted.items():
            room = kept.pop(name, None)
            if room is None or room.shape != shape or room.dtype != dtype:
                room = torch.empty(shape, dtype=dtype, pin_memory=pinned)
            self._kept[name] = room
        return dict(self._kept)


def _wanted(tensors: Mapping[str, Tensor]) -> dict[str, Wanted]:
    return {name: (tensor.shape, tensor.dtype, tensor.is_cuda) for name, tensor in tensors.items()}


def _cut(views: Iterable[memoryview]) -> Iterator[memoryview]:
    """The views, in pieces."""
    for view in views:
        for at in range(0, len(view), PIECE):
            yield view[at : at + PIECE]


def _copy(pieces: list[tuple[memoryview, memoryview]]) -> None:
    for here, there in pieces:
        np.copyto(np.frombuffer(here, np.uint8), np.frombuffer(there, np.uint8))
