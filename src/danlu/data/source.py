"""Where a run's batches come from, and the settings that say so.

Everything is a pure function of the number of a sample: which source it is from (``mixture``), which row of it
(``order``), what the row holds (``pack``). So the position of a run is one integer, the same for any number of ranks,
workers or batches built ahead, and is gone to at once.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from danlu.core.batch import Batch
from danlu.core.config import setting
from danlu.core.errors import Failure, InputError
from danlu.data.mixture import Mixture
from danlu.data.order import Permutation
from danlu.data.pack import Cut, Row, stack
from danlu.data.sizes import Ramp, sizes
from danlu.data.store import Span, Stream

STUCK_SECONDS = 600  # a batch that takes longer will never come: a disk or a network does not answer


@dataclass(frozen=True, kw_only=True)
class Weighted:
    """One source of a mixture."""

    path: str = setting(doc="a raw file, a folder, a glob or a token shard")
    weight: float = setting(doc="its share of the rows, against the other weights", above=0)


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Running text, for pre-training."""

    kind: Literal["corpus"] = setting("corpus", "running text, for pre-training")
    tokenizer: str = setting("byte", "byte, or the path of tokenizer.json, tokenizer.model or a Hugging Face folder")
    train: list[str | Weighted] = setting(doc="raw files or token shards; {path, weight} entries are mixed by weight")
    validation: float | list[str] = setting(
        0.05, "a share of the documents to hold out, or a list of paths", at_least=0, below=1
    )
    sequence_length: int = setting(512, "tokens of a row", at_least=1)
    packing: bool = setting(True, "documents are concatenated and cut; false: one document a row, padded")
    workers: int = setting(1, "threads that build batches; 0: batches are built when they are asked for", at_least=0)
    prefetch: int = setting(2, "global batches built ahead", at_least=0)
    split: Literal["document", "line", "paragraph"] = setting("document", "what of a .txt file is one document")
    text: str = setting("text", "the column or key that holds the text")
    on_bad: Literal["stop", "skip"] = setting("stop", "what to do with a record that cannot be read")

    def __post_init__(self) -> None:
        if len({isinstance(entry, Weighted) for entry in self.train}) > 1:
            raise ValueError("data.train: either every entry has a weight, as {path: …, weight: …}, or none has")


@dataclass(frozen=True, kw_only=True)
class Set:
    """One source: a stream of documents, its name in sample ids, and its weight against the others."""

    name: str
    stream: Stream
    weight: float = 1


@dataclass(frozen=True, slots=True)
class Summary:
    """What a source holds: tokens, documents, rows an epoch, and its share of the rows that are drawn.

    pieces   rows that only go on with a document longer than a row; 0 where documents are packed
    """

    name: str
    tokens: int
    documents: int
    rows: int
    share: float
    pieces: int


class Rows:
    """The batches of a run: rows of its sources, mixed by weight, each source in a new order every epoch.

    Batch g holds samples g B … (g + 1) B of one endless line, B being ``global_batch_size``; rank r of ``size`` takes
    the r-th slice. With a ``ramp`` the first batches hold fewer: the line is the same, cut otherwise. A source that is
    used up goes on with its next epoch. ``epochs`` ends the line after that many times as many samples as all sources
    have rows; what a batch lacks then is padding, so that every rank has as many rows and no sample is repeated.
    Without ``epochs`` the line has no end.

    waited   seconds that the last ``take`` waited for its batch
    tokens   tokens in the last batch of this rank, padding left out
    rows     rows of all sources: samples of an epoch
    """

    def __init__(
        self,
        sets: Sequence[Set],
        *,
        sequence_length: int,
        global_batch_size: int,
        ramp: Ramp | None = None,
        seed: int,
        pad_id: int,
        packing: bool = True,
        vocab_size: int | None = None,
        epochs: float | None = None,
        rank: int = 0,
        size: int = 1,
        workers: int = 1,
        prefetch: int = 2,
        pin: bool = False,
    ) -> None:
        if global_batch_size % size:
            raise InputError(
                f"batch.global_batch_size is {global_batch_size}, which {size} data-parallel ranks cannot share evenly."
            )
        self.sizes = sizes(global_batch_size, ramp, sequence_length=sequence_length)
        if uneven := [rows for rows in self.sizes.rows if rows % size]:
            raise InputError(f"batch.ramp: {uneven[0]} rows cannot be shared evenly by {size} data-parallel ranks.")
        self.reader = _Reader(sets, length=sequence_length, packing=packing, pad_id=pad_id, vocab=vocab_size, pin=pin)
        self.mixture = Mixture([each.weight for each in sets])
        self.rows = sum(cut.rows for cut in self.reader.cuts)
        self.planned = self.end = None if epochs is None else math.ceil(Fraction(str(epochs)) * self.rows)
        self.passed = 0  # samples that were passed over, which the end comes later for
        self.global_batch_size, self.seed = global_batch_size, seed
        self.rank, self.size = rank, size
        self.samples, self.waited, self.tokens = 0, 0.0, 0
        self.reached = 0  # samples that are being built ahead, or are
        self.prefetch, self.stuck = prefetch, False
        self.pool = ThreadPoolExecutor(workers, thread_name_prefix="data") if workers and prefetch else None
        self.ahead: deque[Future[tuple[Batch, int]]] = deque()

    def take(self, micros: int) -> list[Batch]:
        """This rank's rows of the next global batch, cut into micro-batches; the position moves on by one update.

        micros: micro-batches of a full update; a smaller one, of a ramp, is cut into micro-batches of as many rows, the
        last perhaps of fewer. Raises what went wrong in building it, with the sample's id; the position then stays.
        """
        full = self.global_batch_size // self.size
        if full % micros:
            raise InputError(f"{full} rows a rank cannot be cut into {micros} micro-batches of equal size.")
        begun = time.perf_counter()
        batch, self.tokens = self._next()
        self.waited = time.perf_counter() - begun
        self.samples += self._size(self.samples)
        each = full // micros
        return [batch.rows(start, min(start + each, len(batch))) for start in range(0, len(batch), each)]

    def state(self) -> dict[str, int]:
        """The position: samples taken, on all ranks together."""
        return {"samples": self.samples} | ({"passed": self.passed} if self.passed else {})

    def seek(self, state: Mapping[str, int]) -> None:
        """Go to a position at once; also one that another batch size or number of ranks came to."""
        if not {"samples"} <= set(state) <= {"samples", "passed"} or min(state.values()) < 0:
            raise InputError(f"a data position is {{'samples': number}}, not {dict(state)}.")
        self._forget()
        self.samples, self.passed = state["samples"], state.get("passed", 0)
        self.end = None if self.planned is None else self.planned + self.passed

    def pass_over(self, state: Mapping[str, int]) -> None:
        """Go to a later position: what lies between is not learned from, and where the line has an end, as many samples
        of the next epoch come in their place."""
        self.seek({"samples": state["samples"], "passed": self.passed + state["samples"] - self.samples})

    @property
    def epoch(self) -> float:
        """How many times over the sources' rows have been taken."""
        return (self.samples if self.end is None else min(self.samples, self.end)) / self.rows

    def updates_per_epoch(self, global_batch_size: int) -> int:
        """Updates that an epoch takes, the last one perhaps not full."""
        return -(-self.rows // global_batch_size)

    @property
    def updates(self) -> int | None:
        """Updates to the end of the last epoch; None where there is no end. Epochs share the batch they meet in."""
        return None if self.planned is None else self.sizes.updates(self.planned)

    def describe(self) -> list[Summary]:
        """What each source holds."""
        return self.reader.describe(self.mixture)

    def locate(self, sample: str) -> list[Span]:
        """The pieces of documents behind a sample id."""
        return self.reader.locate(sample)

    def close(self) -> None:
        """Threads have ended and nothing is built any more."""
        self._forget()
        if self.pool is not None:
            self.pool.shutdown(wait=not self.stuck)

    def _next(self) -> tuple[Batch, int]:
        if self.pool is None:
            return self._build(self.samples)
        if not self.ahead:
            self.reached = self.samples
        while len(self.ahead) <= self.prefetch:
            self.ahead.append(self.pool.submit(self._build, self.reached))
            self.reached += self._size(self.reached)
        future = self.ahead.popleft()
        try:
            return future.result(STUCK_SECONDS)
        except BaseException as error:
            self._forget()
            self.stuck = isinstance(error, TimeoutError) and not future.done()
            if not self.stuck:
                raise
        raise Failure(
            f"the batch that begins with sample {self.samples} was not there after {STUCK_SECONDS} s: a file of "
            "data.train does not answer; when it does, the same command goes on"
        )

    def _size(self, samples: int) -> int:
        """Rows of the update that begins at a sample: a ramp goes by what was learned from, not by what was passed."""
        return self.sizes.at(samples - self.passed)

    def _forget(self) -> None:
        for future in self.ahead:
            future.cancel()
        self.ahead.clear()

    def _build(self, samples: int) -> tuple[Batch, int]:
        """This rank's rows of the global batch that starts at a sample, and how many tokens are in them."""
        local = self._size(samples) // self.size
        first = samples + self.rank * local
        orders: dict[tuple[int, int], Permutation] = {}
        chosen: list[Row | None] = []
        for sample in range(first, first + local):
            if self.end is not None and sample >= self.end:
                chosen.append(None)
                continue
            source, number = self.mixture.place(sample)
            each, cut = self.reader.sets[source], self.reader.cuts[source]
            epoch, place = divmod(number, cut.rows)
            if (source, epoch) not in orders:
                orders[source, epoch] = Permutation(cut.rows, seed=self.seed, name=each.name, epoch=epoch)
            chosen.append(self.reader.row(source, epoch, orders[source, epoch][place]))
        return self.reader.batch(chosen)


class Held:
    """The validation rows, each once, in stored order: as many batches on every rank, padded at the end."""

    def __init__(
        self,
        sets: Sequence[Set],
        *,
        sequence_length: int,
        batch_size: int,
        pad_id: int,
        packing: bool = True,
        vocab_size: int | None = None,
        rank: int = 0,
        size: int = 1,
        pin: bool = False,
    ) -> None:
        self.reader = _Reader(sets, length=sequence_length, packing=packing, pad_id=pad_id, vocab=vocab_size, pin=pin)
        self.rows = sum(cut.rows for cut in self.reader.cuts)
        self.batch_size, self.rank, self.size = batch_size, rank, size

    def __len__(self) -> int:
        """Batches on each rank."""
        return -(-self.rows // (self.batch_size * self.size))

    def __iter__(self) -> Iterator[Batch]:
        """Batches of ``batch_size`` rows; batch b of rank r holds rows (b size + r) batch_size and on."""
        places = ((source, row) for source, cut in enumerate(self.reader.cuts) for row in range(cut.rows))
        for number in range(len(self) * self.size):
            rows = [next(places, None) for _ in range(self.batch_size)]
            if number % self.size == self.rank:
                yield self.reader.batch([None if row is None else self.reader.row(row[0], 0, row[1]) for row in rows])[
                    0
                ]

    def describe(self) -> list[Summary]:
        """What each source holds."""
        return self.reader.describe(Mixture([cut.rows for cut in self.reader.cuts]))

    def locate(self, sample: str) -> list[Span]:
        """The pieces of documents behind a sample id."""
        return self.reader.locate(sample)


class _Reader:
    """The sources, cut into rows; what ``Rows`` and ``Held`` share."""

    def __init__(
        self, sets: Sequence[Set], *, length: int, packing: bool, pad_id: int, vocab: int | None, pin: bool
    ) -> None:
        names = [each.name for each in sets]
        if not sets or len(set(names)) < len(names):
            raise InputError(f"each source needs a name of its own, not {names}.")
        self.sets = list(sets)
        self.cuts = [Cut(each.stream, length=length, packing=packing) for each in sets]
        self.length, self.pad_id, self.vocab, self.pin = length, pad_id, vocab, pin

    def row(self, source: int, epoch: int, row: int) -> Row:
        return Row(self.cuts[source], row, f"{self.sets[source].name}:{epoch}:{row}")

    def batch(self, rows: Sequence[Row | None]) -> tuple[Batch, int]:
        batch = stack(rows, length=self.length, pad_id=self.pad_id, vocab_size=self.vocab, pin=self.pin)
        bounds = [row.cut.bounds(row.row) for row in rows if row is not None]
        return batch, sum(stop - start for start, stop in bounds)

    def locate(self, sample: str) -> list[Span]:
        name, _, row = sample.rsplit(":", 2)
        source = [each.name for each in self.sets].index(name)
        return self.cuts[source].locate(int(row))

    def describe(self, mixture: Mixture) -> list[Summary]:
        return [
            Summary(each.name, each.stream.tokens, each.stream.documents, cut.rows, float(share), cut.pieces)
            for each, cut, share in zip(self.sets, self.cuts, mixture.shares, strict=True)
        ]
