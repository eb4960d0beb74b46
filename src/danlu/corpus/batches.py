"""Documents, cut and gathered into batches to encode.

Nothing here depends on how many processes encode: the same file gives the same batches.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from danlu.files.document import Document, Reject

SIZE = 1 << 18  # characters of a batch, and of a piece of a long document
WHOLE = 4 << 20  # characters of the longest document that is encoded in one go
RECORDS = 8192  # records of a batch, so that many short ones do not gather without end
WORD_END = re.compile(r"(?<=[^\W_])[ \n]")  # no pre-tokeniser joins a letter or digit with the blank behind it


class Encoder(Protocol):
    """What is asked of a tokenizer here; ``begin`` is what a document starts with, ``eos_id`` what ends it."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def begin(self) -> list[int]: ...
    @property
    def eos_id(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...


class Piece(NamedTuple):
    """A stretch of a document: all of it, if it both starts and ends here. A tuple crosses pipes fast."""

    text: str
    starts: bool
    ends: bool


@dataclass(slots=True)
class Batch:
    """Pieces of one file in its order, and the bad and empty records met on the way; ``last`` is the file's last."""

    pieces: list[Piece] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    empty: int = 0
    characters: int = 0
    last: bool = False

    @property
    def full(self) -> bool:
        return self.characters >= SIZE or len(self.pieces) + len(self.rejects) >= RECORDS


def gather(records: Iterable[Document | Reject]) -> Iterator[Batch]:
    """The records of one file in batches; there is at least one, and the last says so.

    A document without any text is counted as empty and left out: of it nothing could be learned.
    """
    batch = Batch()
    inside = False  # a document that has not ended
    for record in records:
        if isinstance(record, Reject):
            batch.rejects.append(record)
        elif not inside and not record.goes_on and not record.text.strip():
            batch.empty += 1
        else:
            whole = not inside and not record.goes_on and len(record.text) <= WHOLE
            for text, final in [(record.text, True)] if whole else _cut(record.text):
                ends = final and not record.goes_on
                batch.pieces.append(Piece(text, starts=not inside, ends=ends))
                batch.characters += len(text)
                inside = not ends
                if batch.full:
                    yield batch
                    batch = Batch()
        if batch.full:
            yield batch
            batch = Batch()
    batch.last = True
    yield batch


def encode(encoder: Encoder, pieces: Sequence[Piece]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """The ids of the pieces in one line, and where in it documents end; each begins as it must, and has one end."""
    begin, end = encoder.begin, [encoder.eos_id]
    parts: list[list[int]] = []
    ends: list[int] = []
    at = 0
    for piece, ids in zip(pieces, encoder.encode_batch([piece.text for piece in pieces]), strict=True):
        if piece.starts and begin:
            parts.append(begin)
            at += len(begin)
        parts.append(ids)
        at += len(ids)
        if piece.ends:
            parts.append(end)
            at += 1
            ends.append(at)
    line: Any = chain.from_iterable(parts)
    return np.fromiter(line, np.int32, at), np.array(ends, np.int64)


def _cut(text: str) -> Iterator[tuple[str, bool]]:
    """The text in pieces of about ``SIZE`` characters, cut behind words; each with whether it is the last."""
    start = 0
    while len(text) - start > 2 * SIZE:
        found = WORD_END.search(text, start + SIZE, start + 2 * SIZE)
        stop = found.start() if found else start + SIZE
        yield text[start:stop], False
        start = stop
    yield text[start:], True
