"""Activations that wait on the host for their backward.

What autograd keeps is copied to the host beside the forward's work, and brought back beside the backward's, a little
before it is needed. Whole memories travel, not the tensors that look at them: each once, however many tensors share it,
and every tensor has the strides that it had. So all values and gradients keep their bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from danlu.core.world import local

LARGE = 2**20  # bytes: a smaller tensor stays, since a copy of it costs more than its room is worth
AHEAD = 2**28  # bytes that are on their way back beyond what is asked for

# What makes a weight look otherwise, or joins weights, without being an activation.
_SHAPES = (
    "AliasBackward",
    "CatBackward",
    "CloneBackward",
    "PermuteBackward",
    "ReshapeAliasBackward",
    "SliceBackward",
    "SplitBackward",
    "TBackward",
    "ToCopyBackward",
    "TransposeBackward",
    "UnsafeViewBackward",
    "ViewBackward",
)


class Away:
    """One memory of the device's, copied to the host; brought back for as long as tensors wait for it."""

    def __init__(self, content: Tensor, *, stream: Any) -> None:
        self.device, self.stream = content.device, stream
        self.waiting = 0  # tensors that will be asked for
        self.back: Tensor | None = None
        self._arrived: Any = None
        self.size = content.numel()
        self.host = torch.empty(self.size, dtype=torch.uint8, pin_memory=stream is not None)
        if stream is None:
            self.host.copy_(content)
            return
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.host.copy_(content, non_blocking=True)
        content.record_stream(stream)

    def bring(self) -> None:
        """It is on its way back."""
        if self.back is not None:
            return
        if self.stream is None:
            self.back = self.host.clone()
            return
        with torch.cuda.stream(self.stream):
            self.back = self.host.to(self.device, non_blocking=True)
            self._arrived = self.stream.record_event()

    def arrive(self) -> Tensor:
        """It is there, as bytes on the device."""
        self.bring()
        assert self.back is not None
        if self.stream is not None:
            now = torch.cuda.current_stream(self.device)
            now.wait_event(self._arrived)
            self.back.record_stream(now)
        return self.back


class Packed(NamedTuple):
    """A tensor whose memory is away."""

    away: Away
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Activations:
    """What autograd keeps of at least `large` bytes goes to the host, and comes back for the backward.

    Weights stay where they are, and whatever is only another look at them: views, casts and joins. `weights` are those
    that are known; those that are gathered on the way are found by their history.
    """

    def __init__(
        self, device: torch.device, weights: Iterable[Tensor], *, large: int = LARGE, ahead: int = AHEAD
    ) -> None:
        self.device, self.large, self.ahead = device, large, ahead
        self.moved = 0  # bytes copied to the host so far
        self._weights = {local(weight.detach()).untyped_storage().data_ptr() for weight in weights}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._order: list[weakref.ref[Away]] = []  # as the forward made them: the backward asks from the end
        self._known: dict[tuple[int, int], tuple[StorageWeakRef, weakref.ref[Away]]] = {}

    def __call__(self) -> AbstractContextManager[object]:
        """Inside it, forwards keep their activations on the host."""
        self._order = [one for one in self._order if one() is not None]
        self._known.clear()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor | Packed:
        if tensor.device != self.device or tensor.numel() * tensor.element_size() < self.large:
            return tensor
        if type(tensor) is not Tensor or self._is_weight(tensor):
            return tensor
        away = self._away(tensor)
        away.waiting += 1
        return Packed(away, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, kept: Tensor | Packed) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        content = kept.away.arrive()
        self._bring_earlier(kept.away)
        kept.away.waiting -= 1
        if kept.away.waiting <= 0:
            kept.away.back = None
        made = torch.empty(0, dtype=kept.dtype, device=self.device)
        return made.set_(content.untyped_storage(), kept.offset, kept.size, kept.stride)

    def _away(self, tensor: Tensor) -> Away:
        """The memory that the tensor looks at, sent to the host unless it was already, as it now is."""
        storage = tensor.untyped_storage()
        key = storage.data_ptr(), tensor._version
        if key in self._known:
            alive, sent = self._known[key]
            found = sent()
            if not alive.expired() and found is not None:
                return found
        content = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage, 0, (storage.nbytes(),), (1,))
        away = Away(content, stream=self._stream)
        self.moved += away.size
        self._known[key] = StorageWeakRef(storage), weakref.ref(away)
        self._order.append(weakref.ref(away))
        return away

    def _bring_earlier(self, away: Away) -> None:
        """What the backward will ask for next is on its way, up to so many bytes; what is over is forgotten."""
        while self._order and ((last := self._order[-1]()) is None or last is away or last.waiting <= 0):
            self._order.pop()
        left = self.ahead
        for one in reversed(self._order):
            earlier = one()
            if earlier is not None and earlier.waiting > 0:
                left -= earlier.size
                if left < 0:
                    return
                earlier.bring()

    def _is_weight(self, tensor: Tensor) -> bool:
        if isinstance(tensor._base if tensor._base is not None else tensor, nn.Parameter):
            return True
        if tensor.untyped_storage().data_ptr() in self._weights:
            return True
        return tensor.grad_fn is not None and _of_weights(tensor.grad_fn, 4)


def _of_weights(node: Any, steps: int) -> bool:
    """Whether nothing but weights went into what this node made, and only their look was changed."""
    if "AccumulateGrad" in node.name():
        return True
    if not steps or not node.name().startswith(_SHAPES):
        return False
    before = [earlier for earlier, _ in node.next_functions if earlier is not None]
    return bool(before) and all(_of_weights(earlier, steps - 1) for earlier in before)
