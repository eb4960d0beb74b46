"""Optimiser states that are away between updates, and brought back for one, a bucket of weights at a time.

While a bucket is updated, the next one's states are read ahead and the last one's written behind, by two threads that
do nothing else. What is updated, and by which arithmetic, is the optimiser's own affair: it is shown a few weights and
their states at a time. So an update's bits are those that it has with all states in place.
"""

from __future__ import annotations

import math
import queue
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from danlu.core.world import local
from danlu.memory.places import Place
from danlu.optim.own import spread
from danlu.optim.states import Carry

BUCKET, SMALLEST, SHARE = 2**23, 2**18, 16  # numbers of weights that move at a time: see `portion`
STEP = 2**12  # numbers; slices of weights begin at multiples of it, as kernels' own portions do
ALIGNED = 64  # bytes; a state begins at a multiple of it
MOVING, BEHIND = 3, 2  # buckets in memory; buckets that wait to be written


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Numbers `start` to `stop` of what this rank holds of a weight, in a group of the optimiser's; or all of it."""

    weight: nn.Parameter
    group: int
    start: int
    stop: int


@dataclass(slots=True)
class Spot:
    """Where one state of one weight lies, and what it is as a tensor. layout: of a state that is cut over ranks."""

    room: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: DTensor | None = None
    after: int = field(default=-1)  # where an update writes it

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Brought = dict[Piece, dict[str, Tensor]]
Spots = Mapping[nn.Parameter, Mapping[str, Spot]]


class StatesAway:
    """An optimiser's states, in a place that is not the device's memory; its update, made bucket by bucket.

    elementwise: whether each number moves by itself, so that a large weight may be moved in slices. move: makes an
    update of the weights that the optimiser is shown. Its states must be tensors, by weight; one that is a single
    number stays in memory. bucket: numbers that move at a time, over all ranks, if not `portion`. Ranks cut buckets
    alike, since an optimiser may ask other ranks for sums.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        place: Place,
        *,
        elementwise: bool,
        move: Carry,
        bucket: int | None = None,
    ) -> None:
        self.optimizer, self.place, self.elementwise, self.move = optimizer, place, elementwise, move
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        most = bucket or portion(sum(weight.numel() for weight in weights))
        self.buckets = list(_buckets(_pieces(optimizer, most if elementwise else None), most))
        self.device = local(weights[0]).device if weights else torch.device("cpu")
        self._spots: dict[nn.Parameter, dict[str, Spot]] = {}
        # Single numbers: never written to, always replaced; and those of the update that is under way.
        self._numbers: dict[nn.Parameter, dict[str, Tensor]] = {}
        self._after: dict[nn.Parameter, dict[str, Tensor]] = {}
        self._reader = ThreadPoolExecutor(1, "danlu states read")
        self._writer = ThreadPoolExecutor(1, "danlu states write")
        cuda = self.device.type == "cuda"
        self._streams = [torch.cuda.Stream(self.device) for _ in range(2)] if cuda else [None, None]
        self._behind: deque[Future[None]] = deque()

    @property
    def still(self) -> bool:
        """Whether what `state` gives stays as it is while it is held, whatever updates follow."""
        return self.place.still

    @torch.no_grad()
    def step(self, update: int) -> None:
        """Every weight that has a gradient has moved, and its new states are on their way to their place."""
        self.settle()
        self._choose_rooms()
        known = {weight: dict(spots) for weight, spots in self._spots.items()}  # not those that this update makes
        pool = _Pool(self._largest(), min(MOVING, len(self.buckets)), self.device)
        begun = self._now()
        try:
            ahead = self._ahead(0, known, pool, begun)
            for index, bucket in enumerate(self.buckets):
                buffer, brought = ahead.result()
                ahead = self._ahead(index + 1, known, pool, begun)
                moved = self._update(bucket, brought, update)
                self._behind.append(self._writer.submit(self._send, moved, buffer, pool, self._now()))
                while len(self._behind) > BEHIND:
                    self._behind.popleft().result()
        except BaseException:
            pool.give(None)  # nobody waits for a buffer any more
            raise
        self._change_rooms()

    def settle(self) -> None:
        """All that was written behind is in its place, and no buffer is left; what went wrong with it is raised."""
        while self._behind:
            self._behind.popleft().result()
        for thread in (self._reader, self._writer):  # each holds what it moved last until it takes up something else
            thread.submit(int).result()

    def state(self, weight: nn.Parameter) -> dict[str, Tensor]:
        """Every state of a weight, on the host. Each one's memory is the place's own: nothing may be written to it."""
        self.settle()
        kept: dict[str, Tensor] = dict(self._numbers.get(weight, {}))
        for kind, spot in self._spots.get(weight, {}).items():
            value = self.place.lend(spot.room).view(spot.dtype).view(spot.shape)
            kept[kind] = value if spot.layout is None else _laid(value, spot.layout)
        return kept

    def restore(self, weight: nn.Parameter, kind: str, value: Tensor) -> None:
        """This state of this weight is as given."""
        here = local(value).detach()
        if value.dim() == 0:
            self._numbers.setdefault(weight, {})[kind] = here.clone()
            return
        spot = self._spot(weight, kind, value)
        self.place.write(spot.room, 0, here.contiguous())
        self._wait_for_device()

    def clear(self) -> None:
        """No weight has a state."""
        self.settle()
        for spots in self._spots.values():
            for spot in spots.values():
                self.place.leave(spot.room)
        self._spots.clear()
        self._numbers.clear()

    def _ahead(self, index: int, known: Spots, pool: _Pool, begun: Any) -> Future[tuple[Tensor | None, Brought]]:
        if index >= len(self.buckets):
            done: Future[tuple[Tensor | None, Brought]] = Future()
            done.set_result((None, {}))
            return done
        return self._reader.submit(self._bring, self.buckets[index], known, pool, begun)

    def _bring(self, bucket: Sequence[Piece], known: Spots, pool: _Pool, begun: Any) -> tuple[Tensor | None, Brought]:
        """The states of a bucket, in one buffer of the pool's; weights without a gradient have none. (A thread's.)"""
        pieces = [piece for piece in bucket if piece.weight.grad is not None]
        brought: Brought = {piece: {} for piece in pieces}
        wanted = [(piece, kind, spot) for piece in pieces for kind, spot in known.get(piece.weight, {}).items()]
        if not wanted:
            return None, brought
        buffer, at = pool.take(), 0
        with self._aside(0, begun):
            for piece, kind, spot in wanted:
                first, last = self._span(piece, spot)
                there = buffer[at : at + last - first]
                self.place.read(spot.room, first, there)
                brought[piece][kind] = self._shaped(piece, spot, there)
                at += -(-(last - first) // ALIGNED) * ALIGNED
        return buffer, brought

    def _update(self, bucket: Sequence[Piece], brought: Brought, update: int) -> list[tuple[int, int, Tensor]]:
        """The bucket's weights have moved; gives what is to be written: room, first byte, content."""
        groups, state = self.optimizer.param_groups, self.optimizer.state
        held = [group["params"] for group in groups]
        shown = {piece: _shown(piece, self.elementwise) for piece in brought}
        try:
            for index, group in enumerate(groups):
                group["params"] = [shown[piece] for piece in brought if piece.group == index]
            for piece, states in brought.items():
                numbers = {kind: value.clone() for kind, value in self._numbers.get(piece.weight, {}).items()}
                if states or numbers:
                    state[shown[piece]] = states | numbers
            self.move(self.optimizer, update)
            return [job for piece in brought for job in self._kept(piece, state.pop(shown[piece], {}))]
        finally:
            for group, parameters in zip(groups, held):
                group["params"] = parameters

    def _kept(self, piece: Piece, states: Mapping[str, Any]) -> Iterator[tuple[int, int, Tensor]]:
        for kind, value in states.items():
            assert isinstance(value, Tensor), f"{kind}: {type(value).__name__} cannot be kept away"
            if value.dim() == 0:
                self._after.setdefault(piece.weight, {})[kind] = value
                continue
            spot = self._spots.get(piece.weight, {}).get(kind) or self._spot(piece.weight, kind, value)
            first, last = self._span(piece, spot)
            held = local(value).contiguous()
            assert (held.dtype, held.nbytes) == (spot.dtype, last - first), f"{kind} has changed its form"
            yield spot.after, first, held

    def _send(self, moved: list[tuple[int, int, Tensor]], buffer: Tensor | None, pool: _Pool, moved_at: Any) -> None:
        """What was moved is in its place, and the buffer may be used again. (A thread's.)"""
        try:
            with self._aside(1, moved_at):
                for room, start, content in moved:
                    self.place.write(room, start, content)
        finally:
            if buffer is not None:  # whoever waits for it goes on, and hears of a failure later
                pool.give(buffer)

    def _spot(self, weight: nn.Parameter, kind: str, value: Tensor) -> Spot:
        """A new place for a state of this weight, like this value of it or of a slice."""
        like = weight if self.elementwise else value  # what the optimiser was shown, if slices, was flat
        layout = _hollow(like.detach()) if isinstance(like, DTensor) else None
        spot = Spot(0, tuple(local(like).shape), value.dtype, layout)
        spot.room = spot.after = self.place.room(spot.bytes)
        self._spots.setdefault(weight, {})[kind] = spot
        return spot

    def _span(self, piece: Piece, spot: Spot) -> tuple[int, int]:
        """The bytes of a state that belong to a piece."""
        if not self.elementwise:
            return 0, spot.bytes
        return piece.start * spot.dtype.itemsize, piece.stop * spot.dtype.itemsize

    def _shaped(self, piece: Piece, spot: Spot, there: Tensor) -> Tensor:
        value = there.view(spot.dtype)
        if self.elementwise:
            return value
        return value.view(spot.shape) if spot.layout is None else _laid(value.view(spot.shape), spot.layout)

    def _largest(self) -> int:
        """Bytes of the largest bucket's states."""
        return max((sum(self._bytes(piece) for piece in bucket) for bucket in self.buckets), default=0)

    def _bytes(self, piece: Piece) -> int:
        spans = (self._span(piece, spot) for spot in self._spots.get(piece.weight, {}).values())
        return sum(-(-(last - first) // ALIGNED) * ALIGNED for first, last in spans)

    def _choose_rooms(self) -> None:
        """Each state will be written where it lies, or elsewhere if somebody still looks at it (a save under way)."""
        self._after = {}
        for weight, spots in self._spots.items():
            for spot in spots.values():
                looked_at = weight.grad is not None and self.place.lent(spot.room)
                spot.after = self.place.another(spot.room, spot.bytes) if looked_at else spot.room

    def _change_rooms(self) -> None:
        for spots in self._spots.values():
            for spot in spots.values():
                if spot.after != spot.room:
                    self.place.leave(spot.room)
                    spot.room = spot.after
        for weight, numbers in self._after.items():
            self._numbers.setdefault(weight, {}).update(numbers)

    def _now(self) -> Any:
        """What has been given to the device so far, to be waited for by another stream."""
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None

    @contextmanager
    def _aside(self, index: int, after: Any) -> Iterator[None]:
        """On a stream beside the device's work, after what it waits for; done when it ends."""
        stream = self._streams[index]
        if stream is None:
            yield
            return
        with torch.cuda.stream(stream):
            stream.wait_event(after)
            yield
        stream.synchronize()

    def _wait_for_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


class _Pool:
    """Buffers for the buckets that are under way; gone when the last of them is written."""

    def __init__(self, size: int, count: int, device: torch.device) -> None:
        self.free: queue.Queue[Tensor | None] = queue.Queue()
        for _ in range(count if size else 0):
            self.free.put(torch.empty(size, dtype=torch.uint8, device=device))

    def take(self) -> Tensor:
        """A buffer, as soon as one is free."""
        buffer = self.free.get()
        if buffer is None:
            self.free.put(None)
            raise RuntimeError("the update that this was for has failed")
        return buffer

    def give(self, buffer: Tensor | None) -> None:
        """The buffer is free; None: there will be no more."""
        self.free.put(buffer)


def portion(numbers: int) -> int:
    """Numbers that move at a time, of so many over all ranks: a sixteenth, but not so few that threads wait for each
    other, nor more than 64 MB of AdamW's moments. States of three portions have memory in an update.
    """
    return min(BUCKET, max(SMALLEST, numbers // SHARE))


def _pieces(optimizer: torch.optim.Optimizer, most: int | None) -> Iterator[Piece]:
    """Every weight of the optimiser's, whole, or in slices of about so many numbers over all ranks."""
    for index, group in enumerate(optimizer.param_groups):
        for weight in group["params"]:
            held = local(weight.detach())
            here = max(held.numel(), 1)
            cut = here
            if most is not None and held.is_contiguous():
                cut = -(-most * here // max(weight.numel(), 1) // STEP) * STEP
            for start in range(0, here, cut):
                yield Piece(weight, index, start, min(start + cut, held.numel()))


def _buckets(pieces: Iterator[Piece], most: int) -> Iterator[list[Piece]]:
    """Pieces together, up to so many numbers of whole weights over all ranks, so that ranks cut them alike."""
    bucket: list[Piece] = []
    filled = 0
    for piece in pieces:
        here = local(piece.weight.detach()).numel()
        share = (piece.stop - piece.start) / here if here else 1.0
        size = round(piece.weight.numel() * share)
        if bucket and filled + size > most:
            yield bucket
            bucket, filled = [], 0
        bucket.append(piece)
        filled += size
    if bucket:
        yield bucket


def _shown(piece: Piece, elementwise: bool) -> Tensor:
    """The weight, or the slice of it, that the optimiser is shown in its place, with its gradient."""
    if not elementwise:
        return piece.weight
    assert piece.weight.grad is not None
    part = local(piece.weight.detach()).view(-1)[piece.start : piece.stop]
    part.grad = local(piece.weight.grad).reshape(-1)[piece.start : piece.stop]
    return part


def _hollow(like: Tensor) -> DTensor:
    """A tensor laid out like this one, without its memory."""
    assert isinstance(like, DTensor)
    return _laid(torch.empty(0, dtype=like.dtype), like)


def _laid(value: Tensor, like: DTensor) -> DTensor:
    """This rank's part, laid out over the ranks as another tensor is."""
    return spread(value, like, shape=like.shape, stride=like.stride())
