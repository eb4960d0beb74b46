"""Copies of tensors in the host's memory: made by several threads, in room that is kept from one save to the next."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from danlu.checkpoint.shard import view_bytes
from danlu.checkpoint.threads import in_shares

PIECE = 8 << 20  # bytes that are copied or touched at once
PAGE = 4096

Bytes = npt.NDArray[np.uint8]


class Copies:
    """Room for copies of tensors, as much as the tensors take.

    The system makes fresh memory ready when it is first touched, which takes longer than the copy; so ``reserve``
    touches it beforehand, beside training.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}
        self._toucher: threading.Thread | None = None
        self._enough = threading.Event()

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """There is room for tensors like these, or will be soon."""
        rooms = self._rooms(tensors)
        views = [view_bytes(room) for room in rooms.values() if not room.is_pinned()]

        def touch() -> None:
            for piece in _cut(views):
                if self._enough.is_set():
                    return
                np.frombuffer(piece, np.uint8)[::PAGE] = 0

        self._toucher = threading.Thread(target=touch, name="danlu room", daemon=True)
        self._toucher.start()

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of the tensors, in the place of those that were given before."""
        rooms = self._rooms(tensors)
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

    def _rooms(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Room for each tensor, the old one where it fits; nobody touches it any more."""
        if self._toucher is not None:
            self._enough.set()
            self._toucher.join()
            self._toucher = None
            self._enough.clear()
        pin = torch.cuda.is_available()
        kept, self._kept = self._kept, {}
        for name, tensor in tensors.items():
            room = kept.pop(name, None)
            if room is None or room.shape != tensor.shape or room.dtype != tensor.dtype:
                room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin and tensor.is_cuda)
            self._kept[name] = room
        return dict(self._kept)


def _cut(views: Iterable[memoryview]) -> Iterator[memoryview]:
    """The views, in pieces."""
    for view in views:
        for at in range(0, len(view), PIECE):
            yield view[at : at + PIECE]


def _copy(pieces: list[tuple[memoryview, memoryview]]) -> None:
    for here, there in pieces:
        np.copyto(np.frombuffer(here, np.uint8), np.frombuffer(there, np.uint8))
