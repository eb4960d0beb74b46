"""Rows: a stream of documents cut into lines of S tokens, and rows stacked into a batch.

Labels are shifted here and nowhere else. A row of S tokens looks one token further, so that every token but the first
of each document is a target exactly once an epoch: labels per epoch = tokens - documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from danlu.core.batch import IGNORE, Batch
from danlu.core.errors import Failure, InputError
from danlu.data.store import Array, Span, Stream


class Cut:
    """A stream cut into rows of at most ``length`` tokens; every token is in exactly one row.

    With ``packing`` documents follow one another and row k covers tokens k S … (k + 1) S; nothing is kept. Without it a
    row holds one document, or a piece of one that is longer; 8 bytes a row are kept.

    rows    how many
    pieces  rows that go on with a document that an earlier row began, known without packing only (else 0)
    """

    def __init__(self, stream: Stream, *, length: int, packing: bool) -> None:
        self.stream, self.length = stream, length
        self.edges: Array | None = None
        self.rows, self.pieces = -(-stream.tokens // length), 0
        if not packing:
            starts = stream.starts()
            self.edges = _edges(starts, stream.tokens, length)
            self.rows = len(self.edges) - 1
            self.pieces = self.rows - len(starts)

    def bounds(self, row: int) -> tuple[int, int]:
        """The positions in the stream where a row starts and ends."""
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row} of {self.rows}")
        if self.edges is not None:
            return int(self.edges[row]), int(self.edges[row + 1])
        return row * self.length, min((row + 1) * self.length, self.stream.tokens)

    def locate(self, row: int) -> list[Span]:
        """The pieces of documents that a row is made of."""
        start, stop = self.bounds(row)
        return self.stream.locate(start, stop - start)

    def fill(self, row: int, out: Array, *, pad_id: int) -> bool:
        """``out`` [4, S] holds the row's tokens, labels, positions and documents; answers if it has two documents.

        Padding is a document of its own, whose labels are IGNORE; it is not counted in the answer, since nothing that
        stands before it can see it.
        """
        start, stop = self.bounds(row)
        size = stop - start
        ids, starts = self.stream.read(start, min(size + 1, self.stream.tokens - start))
        tokens, labels, positions, documents = out
        tokens[:size], tokens[size:] = ids[:size], pad_id
        labels[: len(ids) - 1], labels[len(ids) - 1 :] = ids[1:], IGNORE
        starts = starts[starts > 0]
        labels[starts - 1] = IGNORE
        begins = starts[starts < size]
        several = begins.size > 0
        if size < self.length:
            begins = np.append(begins, size)
        documents[:] = 0
        documents[begins] = 1
        np.cumsum(documents, out=documents)
        positions[:] = np.arange(self.length) - np.append(0, begins)[documents]
        return several


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a batch: the cut that it is taken from, which row of it, and its id."""

    cut: Cut
    row: int
    sample: str


def stack(
    rows: Sequence[Row | None], *, length: int, pad_id: int, vocab_size: int | None = None, pin: bool = False
) -> Batch:
    """The rows as a batch, in pinned memory where asked; None is a row of padding, whose sample id is empty.

    Raises a Failure that names the sample where a row cannot be read or holds an id outside the vocabulary.
    """
    block = torch.empty((4, len(rows), length), dtype=torch.int64, pin_memory=pin)
    packed = False
    for number, row in enumerate(rows):
        out = block[:, number].numpy()
        if row is None:
            out[0], out[1], out[2], out[3] = pad_id, IGNORE, np.arange(length), 0
            continue
        try:
            packed |= row.cut.fill(row.row, out, pad_id=pad_id)
        except Failure:
            raise
        except Exception as error:
            raise Failure(f"sample {row.sample} could not be read: {error!r}") from error
        highest = int(out[0].max())
        if vocab_size is not None and highest >= vocab_size:
            raise InputError(f"sample {row.sample} holds id {highest}, but model.vocab_size is {vocab_size}.")
    tokens, labels, positions, documents = block.unbind(0)
    samples = tuple("" if row is None else row.sample for row in rows)
    return Batch(tokens=tokens, labels=labels, positions=positions, documents=documents, packed=packed, samples=samples)


def _edges(starts: Array, tokens: int, length: int) -> Array:
    """Where rows start that hold one document or a piece of one, and the end of the last: [rows + 1]."""
    pieces = -(-np.diff(np.append(starts, tokens)) // length)
    first = np.cumsum(pieces) - pieces  # the row in which each document begins
    within = np.arange(pieces.sum()) - np.repeat(first, pieces)
    return np.append(np.repeat(starts, pieces) + within * length, tokens)
