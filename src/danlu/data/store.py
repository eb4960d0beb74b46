"""Token shards as one stream of documents, read at any position.

Ids are read with ``pread``, not through the memory map: a map's pages would count as this process's memory and grow
with what was read; a page that is not there yet would hold the interpreter's lock while the disk works; and a file cut
short under a map ends the process without a word.
"""

from __future__ import annotations

import os
import resource
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from danlu.core.errors import Failure, InputError
from danlu.files.megatron import Index
from danlu.files.sidecar import part

Array = npt.NDArray[np.int64]
LOOKS = 64  # places of a shard whose ids are looked at when it is opened
LOOK = 1024  # tokens at each of them
FILES = 5  # files that an open shard holds: four maps and the handle that ids are read from


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens start … stop of a document of a shard: where a piece of text came from."""

    prefix: Path
    document: int
    start: int
    stop: int


class Stream(Protocol):
    """Tokens in one line, with the places where documents start.

    tokens     how many
    documents  how many; empty ones may be counted where the index of a shard counts them
    """

    @property
    def tokens(self) -> int: ...
    @property
    def documents(self) -> int: ...
    def read(self, position: int, length: int) -> tuple[Array, Array]: ...
    def starts(self) -> Array: ...
    def locate(self, position: int, length: int) -> list[Span]: ...


class Shards:
    """One or many shards, open, as one stream of documents in the order given.

    Nothing is read at opening but headers, ends and a few ids of each shard, so size does not matter. Raises InputError
    where a shard was made by another tokenizer than ``tokenizer`` (a fingerprint; shards of other tools carry none and
    pass), or where an id, or the tokenizer's own vocabulary, does not fit ``vocab_size`` rows of a model's table.
    Reading is safe from many threads.
    """

    def __init__(
        self, prefixes: Sequence[Path], *, tokenizer: str | None = None, vocab_size: int | None = None
    ) -> None:
        if not prefixes:
            raise InputError("there are no token shards to read.")
        _allow_files(FILES * len(prefixes))
        self.shards = [_Shard(Path(prefix)) for prefix in prefixes]
        self.bounds = [0]
        for shard in self.shards:
            self.bounds.append(self.bounds[-1] + shard.tokens)
            shard.check(tokenizer=tokenizer, vocab_size=vocab_size)
        if self.tokens == 0:
            raise InputError(f"{self.shards[0].index.prefix}: the token shards are empty.")

    @property
    def tokens(self) -> int:
        """How many there are in all."""
        return self.bounds[-1]

    @property
    def documents(self) -> int:
        """How many there are in all, as the shards count them: empty ones too."""
        return sum(shard.index.count for shard in self.shards)

    def read(self, position: int, length: int) -> tuple[Array, Array]:
        """``length`` ids from a position on, int64, and the places among them (from 0 on) where documents start."""
        if position < 0 or length < 0 or position + length > self.tokens:
            raise IndexError(f"tokens {position} … {position + length} of {self.tokens}")
        number = bisect_right(self.bounds, position) - 1
        if length and position + length <= self.bounds[number + 1]:
            return self.shards[number].read(position - self.bounds[number], length)
        ids, starts, done = [np.empty(0, np.int64)], [np.empty(0, np.int64)], 0
        while done < length:
            take = min(length - done, self.bounds[number + 1] - position - done)
            if take:
                some, begins = self.shards[number].read(position + done - self.bounds[number], take)
                ids.append(some)
                starts.append(begins + done)
            done, number = done + take, number + 1
        return np.concatenate(ids), np.concatenate(starts)

    def starts(self) -> Array:
        """Where each document that is not empty starts: 8 bytes a document, so ask only when they are all needed."""
        found = []
        for shard, base in zip(self.shards, self.bounds[:-1], strict=True):
            starts = shard.index.starts(0, shard.index.count)
            found.append(starts[:-1][np.diff(starts) > 0] + base)
        return np.concatenate(found)

    def sample(self, positions: Array) -> Array:
        """The ids at many positions, in the shape given."""
        first = bisect_right(self.bounds, int(positions.min())) - 1
        if positions.max() < self.bounds[first + 1]:
            return self.shards[first].map()[positions - self.bounds[first]].astype(np.int64)
        found = np.empty(positions.shape, np.int64)
        for number in range(first, len(self.shards)):
            chosen = (positions >= self.bounds[number]) & (positions < self.bounds[number + 1])
            if chosen.any():
                found[chosen] = self.shards[number].map()[positions[chosen] - self.bounds[number]]
        return found

    def locate(self, position: int, length: int) -> list[Span]:
        """The pieces of documents that ``length`` tokens from a position on are made of."""
        spans = []
        while length > 0:
            number = bisect_right(self.bounds, position) - 1
            index, base = self.shards[number].index, self.bounds[number]
            document = index.find(position - base)
            start = index.start(document)
            take = min(length, index.start(document + 1) + base - position)
            spans.append(Span(index.prefix, document, position - base - start, position - base - start + take))
            position, length = position + take, length - take
        return spans

    def close(self) -> None:
        """The files are closed; nothing can be read any more."""
        for shard in self.shards:
            shard.close()


class _Shard:
    """One shard: its index, and its ids by ``pread``."""

    def __init__(self, prefix: Path) -> None:
        self.index = Index(prefix)
        self.tokens = len(self.index.tokens)
        self.file = part(self.index.prefix, ".bin")
        self.handle = os.open(self.file, os.O_RDONLY)
        self.close = weakref.finalize(self, os.close, self.handle)
        # A memoryview is looked up five times faster than an array, and numpy would copy these arrays whole (they
        # are not aligned) before searching them.
        self.pointers, self.documents = _numbers(self.index.pointers), _numbers(self.index.documents)

    def read(self, position: int, length: int) -> tuple[Array, Array]:
        size = self.index.dtype.itemsize
        first = bisect_left(self.pointers, position * size)
        last = _reach(self.pointers, (position + length) * size, first, 64)
        starts: list[int] = []
        if first < last:
            begin = bisect_left(self.documents, first)
            sequences = self.documents[begin : _reach(self.documents, last, begin, last - first)].tolist()
            # An empty document starts where the next one does.
            starts = list(dict.fromkeys([self.pointers[sequence] // size - position for sequence in sequences]))
        return self.ids(position, length), np.array(starts, np.int64)

    def ids(self, position: int, length: int) -> Array:
        size = self.index.dtype.itemsize
        return np.frombuffer(self._bytes(position * size, length * size), self.index.dtype).astype(np.int64)

    def _bytes(self, offset: int, length: int) -> bytes:
        content = os.pread(self.handle, length, offset)
        while len(content) < length:
            more = os.pread(self.handle, length - len(content), offset + len(content))
            if not more:
                raise Failure(f"{self.file} ends at byte {offset + len(content)}: it was cut while it was being read.")
            content += more
        return content

    def map(self) -> npt.NDArray[Any]:
        """The ids memory-mapped anew: what was looked at leaves memory with the map."""
        return np.memmap(self.file, dtype=self.index.dtype, mode="r").view(np.ndarray)

    def check(self, *, tokenizer: str | None, vocab_size: int | None) -> None:
        sidecar = self.index.sidecar
        if tokenizer is not None and sidecar is not None and sidecar.tokenizer != tokenizer:
            raise InputError(
                f"{self.index.prefix} was made by another tokenizer (its fingerprint is {sidecar.tokenizer}, "
                f"this run's is {tokenizer}); tokenise the text again, or name that tokenizer in data.tokenizer."
            )
        if vocab_size is None:
            return
        if sidecar is not None and sidecar.vocab_size > vocab_size:
            raise InputError(
                f"{self.index.prefix}: its tokenizer has {sidecar.vocab_size} ids, "
                f"but model.vocab_size is {vocab_size}."
            )
        step = max(LOOK, self.tokens // LOOKS)
        for position in range(0, self.tokens, step):
            length = min(LOOK, self.tokens - position)
            ids = self.ids(position, length)
            if ids.max() >= vocab_size or ids.min() < 0:
                worst = int(ids.min()) if ids.min() < 0 else int(ids.max())
                raise InputError(f"{self.file} holds id {worst}, but model.vocab_size is {vocab_size}.")


def _numbers(array: npt.NDArray[Any]) -> memoryview:
    """An int64 array that need not be aligned, as a sequence of Python integers."""
    return array.view(np.uint8).data.cast("q") if array.size else memoryview(b"")


def _reach(numbers: memoryview, value: int, low: int, near: int) -> int:
    """The first place from ``low`` on whose number is at least ``value``, looked for within ``near`` places first."""
    high = min(low + near, len(numbers))
    found = bisect_left(numbers, value, low, high)
    return found if found < high else bisect_left(numbers, value, high)


def _allow_files(count: int) -> None:
    """So many more files may be open: the soft limit, often 1,024, is raised within the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = len(list(Path("/dev/fd").iterdir()))
    need = open_now + count + 256  # some for the rest of the run
    if soft == resource.RLIM_INFINITY or need <= soft:
        return
    if hard != resource.RLIM_INFINITY and need > hard:
        raise InputError(
            f"{count // FILES} token shards need {need} open files, but the system allows {hard}; "
            "make fewer and larger shards, or raise the limit (ulimit -Hn)."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
