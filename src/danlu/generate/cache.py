"""Keys and values of the tokens already read, in memory that is taken once."""

from __future__ import annotations

from torch import Tensor

from danlu.core.errors import InputError


class KeyValues:
    """Keys and values of at most `limit` tokens, layer by layer (implements core.contracts.Cache).

    A layer's memory, [B, heads, limit, head_dim] for each of the two, is taken at its first append, in the dtype and on
    the device of what is appended.
    """

    def __init__(self, *, limit: int) -> None:
        self.limit = limit
        self._held: dict[int, int] = {}
        self._room: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def length(self) -> int:
        """Tokens held (the same for every layer between two forwards)."""
        return next(iter(self._held.values()), 0)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add [B, heads, s, head_dim]; give back all that is held for this layer, the new ones last.

        What is given back is a view: it holds until the next append. Raises InputError beyond the limit.
        """
        start = self._held.get(layer, 0)
        stop = start + keys.shape[2]
        if stop > self.limit:
            raise InputError(f"{stop} tokens do not fit a cache of {self.limit}: ask for fewer, or a shorter prompt.")
        if layer not in self._room:
            self._room[layer] = tuple(x.new_empty(*x.shape[:2], self.limit, x.shape[3]) for x in (keys, values))  # type: ignore[assignment]
        room = self._room[layer]
        for whole, new in zip(room, (keys, values)):
            whole[:, :, start:stop] = new
        self._held[layer] = stop
        return room[0][:, :, :stop], room[1][:, :, :stop]
