"""Training and validation: which documents, or parts of them, belong to which.

A document's id is a hash of what is in it, so it stays on its side wherever its file lies, however files are ordered or
cut into shards, and whatever the seed; and two copies of a document are never on both sides.
"""

from __future__ import annotations

import numpy as np

from danlu.core.errors import InputError
from danlu.data.store import Array, Shards, Span, Stream

FEW = 20  # documents; below it, the tail of each is held out
PROBES = 64  # tokens of a document that its id is made of
BLOCK = 8192  # documents hashed at once: 4 MB of positions


class Part:
    """Segments of a stream, one after another, as a stream of their own.

    begins, ends  [n] positions in the stream, rising; a segment holds whole documents, or one end of a document
    documents     how many there are

    16 bytes a segment are kept, and neighbouring documents are one segment.
    """

    def __init__(self, whole: Shards, *, begins: Array, ends: Array, documents: int) -> None:
        self.whole, self.documents = whole, documents
        self.begins = begins
        self.at = np.concatenate(([0], np.cumsum(ends - begins)))

    @property
    def tokens(self) -> int:
        """How many there are."""
        return int(self.at[-1])

    def read(self, position: int, length: int) -> tuple[Array, Array]:
        """``length`` ids from a position on, int64, and the places among them where documents start."""
        if position < 0 or length < 0 or position + length > self.tokens:
            raise IndexError(f"tokens {position} … {position + length} of {self.tokens}")
        ids, starts, done = [np.empty(0, np.int64)], [np.empty(0, np.int64)], 0
        for begin, take, opens in self._pieces(position, length):
            some, begins = self.whole.read(begin, take)
            if opens and not (begins.size and begins[0] == 0):
                begins = np.append(0, begins)  # a document's tail is a document of its own here
            ids.append(some)
            starts.append(begins + done)
            done += take
        return np.concatenate(ids), np.concatenate(starts)

    def starts(self) -> Array:
        """Where each document starts: 8 bytes a document, so ask only when they are all needed."""
        every = self.whole.starts()
        segment = np.searchsorted(self.begins, every, side="right") - 1
        offset = every - self.begins[segment]
        inside = (segment >= 0) & (offset < np.diff(self.at)[segment])
        return np.union1d((self.at[segment] + offset)[inside], self.at[:-1])

    def locate(self, position: int, length: int) -> list[Span]:
        """The pieces of documents that ``length`` tokens from a position on are made of."""
        return [span for begin, take, _ in self._pieces(position, length) for span in self.whole.locate(begin, take)]

    def _pieces(self, position: int, length: int) -> list[tuple[int, int, bool]]:
        """Where the tokens lie in the whole stream: position and length of each piece, whether it opens a segment."""
        segment = int(np.searchsorted(self.at, position, side="right")) - 1
        pieces = []
        while length > 0:
            skip = position - int(self.at[segment])
            take = min(length, int(self.at[segment + 1]) - position)
            pieces.append((int(self.begins[segment]) + skip, take, skip == 0))
            position, length, segment = position + take, length - take, segment + 1
        return pieces


def split(whole: Shards, share: float) -> tuple[Stream, Stream | None]:
    """Training and validation, each document (or each of its two parts) on exactly one side.

    From 20 documents on, whole documents are held out: those whose hash is below the share, at least one and never
    all. Below 20, the last ``share`` of the tokens of each. A share of zero holds nothing out and costs nothing; any
    other reads the index and 64 ids of each document once (about two seconds per million documents) and keeps 16 bytes
    per run of neighbouring documents on one side. Raises InputError where the share is not in [0, 1) or the documents
    are too short.
    """
    if not 0 <= share < 1:
        raise InputError(f"data.validation is a share in [0, 1) or a list of paths, not {share}.")
    if share == 0:
        return whole, None
    starts = whole.starts()
    ends = np.append(starts[1:], whole.tokens)
    if len(starts) < FEW:
        return _tails(whole, starts, ends, share)
    hashes = fingerprints(whole, starts, ends)
    held = hashes < np.uint64(int(share * 2**64))
    if not held.any():
        held = hashes == hashes.min()
    if held.all():
        held = hashes != hashes.max()
    if held.all() or not held.any():
        raise InputError(f"all {len(starts)} documents are the same; none can be held out: set data.validation to 0.")
    return _chosen(whole, starts, ends, ~held), _chosen(whole, starts, ends, held)


def fingerprints(whole: Shards, starts: Array, ends: Array) -> np.ndarray:
    """[D] uint64: a hash of each document's length and of 64 of its ids, evenly spaced from the first to the last."""
    hashes = np.empty(len(starts), np.uint64)
    steps = np.arange(PROBES)
    for first in range(0, len(starts), BLOCK):
        begin, end = starts[first : first + BLOCK, None], ends[first : first + BLOCK, None]
        ids = whole.sample(begin + (end - begin - 1) * steps // (PROBES - 1)).astype(np.uint64)
        state = _mix((end - begin)[:, 0].astype(np.uint64))
        for column in np.ascontiguousarray(ids.T):
            state = _mix(state ^ column)
        hashes[first : first + BLOCK] = state
    return hashes


def _mix(x: np.ndarray) -> np.ndarray:
    """64 bits well mixed (the finaliser of SplitMix64, with its increment)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def _chosen(whole: Shards, starts: Array, ends: Array, chosen: np.ndarray) -> Part:
    """The chosen documents; neighbours become one segment."""
    edges = np.diff(np.concatenate(([0], chosen.astype(np.int8), [0])))
    first, last = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1) - 1
    return Part(whole, begins=starts[first], ends=ends[last], documents=int(chosen.sum()))


def _tails(whole: Shards, starts: Array, ends: Array, share: float) -> tuple[Part, Part]:
    """The head of each document, and its tail of at least two tokens; documents of fewer than four are not cut."""
    lengths = ends - starts
    tail = np.where(lengths < 4, 0, np.clip(np.round(lengths * share).astype(np.int64), 2, lengths - 2))
    cut = tail > 0
    if not cut.any():
        raise InputError(
            f"{len(starts)} documents of fewer than four tokens leave nothing to hold out: set data.validation to 0."
        )
    train = Part(whole, begins=starts, ends=ends - tail, documents=len(starts))
    return train, Part(whole, begins=(ends - tail)[cut], ends=ends[cut], documents=int(cut.sum()))
