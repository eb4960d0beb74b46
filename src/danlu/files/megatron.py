"""Token shards in Megatron's layout: ``<prefix>.bin``, ``<prefix>.idx``, and our sidecar ``<prefix>.meta.json``.

All numbers are little-endian. The ``.bin`` holds token ids one after another; the ``.idx`` holds::

    0   9 bytes  b"MMIDIDX\\x00\\x00"
    9   u64      version, 1
    17  u8       type of the ids: 1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 6 f64, 7 f32, 8 u16
    18  u64      S, sequences
    26  u64      D, documents + 1
    34  i32[S]   lengths of the sequences, in tokens
        i64[S]   where they start in the .bin, in bytes
        i64[D]   the sequence at which each document starts; the first is 0, the last is S

Of text, a sequence is a document, so D = S + 1. An empty document is a sequence of length zero (ours), or no sequence
at all (Megatron's builder); both are read.
"""

from __future__ import annotations

import errno
import os
import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import xxhash

from danlu.core.errors import InputError, Unhealthy
from danlu.core.paths import make_durable
from danlu.files.sidecar import Sidecar, checksum, part, prefix_of

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}  # the codes that hold ids; 6 and 7 are floats
SMALL_VOCABULARY = 65500  # below it ids are uint16: the rule of Megatron's own writer, not 65,536
LONGEST = 2**31 - 1  # tokens of a document: its length is an int32
CHUNK = 1 << 20  # numbers handled at once, so that memory does not grow with the shard

Ids = Sequence[int] | npt.NDArray[Any]


def is_shard(path: Path) -> bool:
    """Whether the path, with or without ``.bin`` or ``.idx``, names a shard whose ``.idx`` exists."""
    return part(prefix_of(path), ".idx").is_file()


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """The type that ids of this vocabulary are written in: uint16 below 65,500, else int32."""
    return np.dtype("<u2" if vocab_size < SMALL_VOCABULARY else "<i4")


class Index:
    """A shard, open: nothing is read at opening but its header and its ends, so size does not matter.

    lengths    [S] int32, pointers [S] int64 (bytes), documents [D] int64: as in the ``.idx``, memory-mapped
    tokens     all ids in one line, memory-mapped, in the file's own type (cast before torch sees them)
    count      documents
    sidecar    what stands beside it, or None

    The mapped arrays of the ``.idx`` are not aligned in memory: numpy copies such an array whole before some functions
    (``searchsorted``), so look positions up with ``find`` instead. A pickled Index opens the files again.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix_of(Path(prefix))
        index, tokens = part(self.prefix, ".idx"), part(self.prefix, ".bin")
        for file in (index, tokens):
            if not file.is_file():
                raise InputError(f"{file} does not exist; a token shard is a .bin and an .idx of the same name.")
        size, self.dtype, sequences, bounds = _header(index)
        lengths_at, pointers_at = HEADER.size, HEADER.size + 4 * sequences
        documents_at, end = pointers_at + 8 * sequences, pointers_at + 8 * sequences + 8 * bounds
        if size == end + sequences and sequences:
            raise InputError(f"{index} is multimodal (it has sequence modes); only text shards can be read.")
        if size != end:
            raise InputError(
                f"{index} is {size} bytes, but {sequences} sequences and {bounds - 1} documents need {end}: "
                "it is cut short or not a shard."
            )
        self.lengths = _map(index, "<i4", lengths_at, sequences)
        self.pointers = _map(index, "<i8", pointers_at, sequences)
        self.documents = _map(index, "<i8", documents_at, bounds)
        self.count = bounds - 1
        held = tokens.stat().st_size
        told = int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize if sequences else 0
        if self.documents[0] != 0 or self.documents[-1] != sequences or (sequences and self.pointers[0] != 0):
            raise InputError(f"{index} is damaged: its documents and its {sequences} sequences do not agree.")
        if held != told:
            raise InputError(f"{tokens} is {held} bytes, but {index.name} tells of {told}: one of them is not whole.")
        self.tokens = _map(tokens, self.dtype, 0, held // self.dtype.itemsize)
        self.sidecar = Sidecar.read(self.prefix)
        if self.sidecar is not None:
            _agree(self.sidecar, self)

    def __len__(self) -> int:
        return self.count

    def __reduce__(self) -> tuple[type[Index], tuple[Path]]:
        return Index, (self.prefix,)

    def start(self, document: int) -> int:
        """The position in ``tokens`` where a document starts; of the one past the last, where all end."""
        sequence = int(self.documents[document])
        if sequence == len(self.pointers):
            return len(self.tokens)
        return int(self.pointers[sequence]) // self.dtype.itemsize

    def starts(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Where the documents first … last start, last included: [last - first + 1]; last may be ``count``."""
        sequences = self.documents[first : last + 1]
        inside = sequences[: int(np.count_nonzero(sequences < len(self.pointers)))]
        found = np.full(len(sequences), len(self.tokens), dtype=np.int64)
        found[: len(inside)] = self.pointers[inside] // self.dtype.itemsize
        return found

    def find(self, position: int) -> int:
        """The document that the token at this position belongs to, by bisection."""
        if not 0 <= position < len(self.tokens):
            raise IndexError(f"token {position} of {len(self.tokens)}")
        sequence = bisect_right(self.pointers, position * self.dtype.itemsize) - 1
        return bisect_right(self.documents, sequence) - 1

    def document(self, number: int) -> npt.NDArray[Any]:
        """The ids of one document, a view of the file."""
        return self.tokens[self.start(number) : self.start(number + 1)]

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """The ids of the positions start … stop, a view of the file."""
        return self.tokens[start:stop]


def verify(prefix: Path, *, vocab_size: int | None = None) -> Index:
    """The shard is whole: every length, pointer and id was looked at, and the checksums if a sidecar holds them.

    Ids are held against ``vocab_size``, else the sidecar's. Raises InputError with the file and what is wrong with it.
    """
    shard = Index(prefix)
    name = part(shard.prefix, ".idx")
    expected = 0
    for start in range(0, len(shard.lengths), CHUNK):
        lengths = shard.lengths[start : start + CHUNK].astype(np.int64)
        ends = expected + np.cumsum(lengths * shard.dtype.itemsize)
        begins = np.concatenate(([expected], ends[:-1]))
        wrong = np.flatnonzero((lengths < 0) | (shard.pointers[start : start + CHUNK] != begins))
        if len(wrong):
            raise InputError(f"{name} is damaged: sequence {start + int(wrong[0])} does not follow the one before it.")
        expected = int(ends[-1])
    for start in range(0, shard.count, CHUNK):
        wrong = np.flatnonzero(np.diff(shard.documents[start : start + CHUNK + 1]) < 0)
        if len(wrong):
            raise InputError(
                f"{name} is damaged: document {start + int(wrong[0]) + 1} starts before the one before it."
            )
    limit = vocab_size if vocab_size is not None else shard.sidecar.vocab_size if shard.sidecar else None
    for start in range(0, len(shard.tokens), CHUNK):
        ids = shard.tokens[start : start + CHUNK]
        bad = np.flatnonzero(ids < 0) if limit is None else np.flatnonzero((ids < 0) | (ids >= limit))
        if len(bad):
            position = start + int(bad[0])
            raise InputError(
                f"{part(shard.prefix, '.bin')}: token {position} has id {int(shard.tokens[position])}, "
                f"but the vocabulary has {limit} ids; the shard was made with another tokenizer."
            )
    if shard.sidecar is not None:
        for ending, told in shard.sidecar.xxh3_128.items():
            file = part(shard.prefix, f".{ending}")
            if (found := checksum(file)) != told:
                raise InputError(f"{file} is damaged: its checksum is {found}, its sidecar says {told}.")
    return shard


class Writer:
    """Writes a shard document by document, in memory that does not grow with it.

    Used as a context: leaving it in peace publishes the files (``.idx`` last: a shard without it does not exist),
    leaving it by an exception leaves nothing. What goes into ``sources`` stands in the sidecar. A shard of fewer than
    ``sync_from`` bytes is not forced to the disk: whoever asks for that checks it whole before it is used.
    """

    def __init__(
        self,
        prefix: Path,
        *,
        vocab_size: int,
        tokenizer: str,
        eos_id: int,
        created_by: str = "danlu",
        sync_from: int = 0,
    ) -> None:
        self.prefix = Path(prefix)
        self.vocab_size, self.tokenizer, self.eos_id, self.created_by = vocab_size, tokenizer, eos_id, created_by
        self.dtype = dtype_for(vocab_size)
        self.n_tokens = self.n_documents = 0
        self.sources: list[dict[str, Any]] = []
        self._hash = xxhash.xxh3_128()
        self._pending: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]] = []
        self._pending_tokens = 0
        self._sync_from = sync_from
        self._open = 0  # tokens of a document that has not ended
        self._temporary = {
            ending: self.prefix.with_name(f".{self.prefix.name}{ending}.{os.getpid()}.part")
            for ending in (".bin", ".lengths", ".idx")
        }

    def __enter__(self) -> Writer:
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        self._bin: IO[bytes] = open(self._temporary[".bin"], "wb")
        self._lengths: IO[bytes] = open(self._temporary[".lengths"], "w+b")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._publish()
        except OSError as failure:
            raise _told(failure, self.prefix) from failure
        finally:
            for file in (self._bin, self._lengths):
                with suppress(OSError):  # what could not be written was told already; the file is thrown away
                    file.close()
            for path in self._temporary.values():
                path.unlink(missing_ok=True)

    def add(self, ids: Ids) -> None:
        """One more document."""
        array = np.asarray(ids) if len(ids) else np.empty(0, np.int64)
        self.add_many(array, np.array([len(array)]))

    def add_many(self, ids: npt.NDArray[Any], ends: npt.NDArray[Any]) -> None:
        """Documents in one line of ids: each ends where ``ends`` says, and what is left over begins the next one.

        Ids outside the vocabulary are refused before they are cast (a cast would wrap round).
        """
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise TypeError(f"documents are one line of whole numbers, not {ids.dtype} of shape {ids.shape}")
        if ids.size and not (ids.min() >= 0 and ids.max() < self.vocab_size):
            worst = int(ids.min()) if ids.min() < 0 else int(ids.max())
            at = np.searchsorted(ends, np.flatnonzero(ids == worst)[0], side="right") + self.n_documents
            raise InputError(f"document {at} holds id {worst}, but the vocabulary has {self.vocab_size} ids.")
        lengths = np.diff(ends, prepend=-self._open)
        self._open = self._open + ids.size if not len(ends) else ids.size - int(ends[-1])
        if max(int(lengths.max(initial=0)), self._open) > LONGEST:
            raise InputError(f"a document has more than {LONGEST:,} tokens, the most that this format holds; split it.")
        self._pending.append((ids.astype(self.dtype), lengths.astype("<i4")))
        self._pending_tokens += ids.size
        self.n_documents += len(lengths)
        self.n_tokens += ids.size
        if self._pending_tokens >= CHUNK or len(self._pending) >= CHUNK:
            self._flush()

    def _flush(self) -> None:
        if not self._pending:
            return
        ids, lengths = (np.concatenate(arrays) for arrays in zip(*self._pending))
        try:
            self._lengths.write(lengths.tobytes())
            self._bin.write(ids.tobytes())
        except OSError as failure:
            raise _told(failure, self.prefix) from failure
        self._hash.update(ids.tobytes())
        self._pending, self._pending_tokens = [], 0

    def _publish(self) -> None:
        """Both files and the sidecar are there; at no moment does a half of them look whole."""
        assert self._open == 0, "the last document was not ended"
        self._flush()
        durable = self.n_tokens * self.dtype.itemsize + 20 * self.n_documents >= self._sync_from
        _settle(self._bin, durable=durable)
        self._lengths.flush()
        index_hash = self._write_index(durable=durable)
        for ending in (".idx", ".meta.json"):
            part(self.prefix, ending).unlink(missing_ok=True)
        self._temporary[".bin"].replace(part(self.prefix, ".bin"))
        Sidecar(
            tokenizer=self.tokenizer,
            vocab_size=self.vocab_size,
            eos_id=self.eos_id,
            dtype=self.dtype.name,
            n_tokens=self.n_tokens,
            n_documents=self.n_documents,
            xxh3_128={"bin": self._hash.hexdigest(), "idx": index_hash},
            created_by=self.created_by,
            sources=self.sources,
        ).write(self.prefix, durable=durable)
        self._temporary[".idx"].replace(part(self.prefix, ".idx"))
        if durable:
            make_durable(self.prefix.parent)

    def _write_index(self, *, durable: bool) -> str:
        code = {name: code for code, name in DTYPES.items()}[self.dtype.str[1:]]
        state = xxhash.xxh3_128()
        with open(self._temporary[".idx"], "wb") as file:
            for block in self._index(code):
                file.write(block)
                state.update(block)
            _settle(file, durable=durable)
        return state.hexdigest()

    def _index(self, code: int) -> Iterator[bytes]:
        """The ``.idx`` in blocks: header, lengths, pointers, documents."""
        yield HEADER.pack(MAGIC, 1, code, self.n_documents, self.n_documents + 1)
        self._lengths.seek(0)
        while block := self._lengths.read(4 * CHUNK):
            yield block
        self._lengths.seek(0)
        at = 0
        while block := self._lengths.read(4 * CHUNK):
            ends = at + np.cumsum(np.frombuffer(block, "<i4").astype(np.int64) * self.dtype.itemsize)
            yield np.concatenate(([at], ends[:-1])).astype("<i8").tobytes()
            at = int(ends[-1])
        for first in range(0, self.n_documents + 1, CHUNK):
            yield np.arange(first, min(first + CHUNK, self.n_documents + 1), dtype="<i8").tobytes()


def _header(index: Path) -> tuple[int, np.dtype[Any], int, int]:
    """Size of the file, type of the ids, sequences, documents + 1."""
    with open(index, "rb") as file:
        head = file.read(HEADER.size)
        size = os.fstat(file.fileno()).st_size
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise InputError(f"{index} is not a Megatron index: it does not start with {MAGIC[:7].decode()}.")
    _, version, code, sequences, bounds = HEADER.unpack(head)
    if version != 1:
        raise InputError(f"{index} is of version {version}; only version 1 can be read.")
    if code not in DTYPES:
        raise InputError(f"{index} has type code {code}; token ids have one of {sorted(DTYPES)}.")
    if bounds < 1 or sequences > size or bounds > size:
        raise InputError(f"{index} is damaged: {sequences} sequences, {bounds} bounds in {size} bytes.")
    return size, np.dtype("<" + DTYPES[code]), sequences, bounds


def _map(file: Path, dtype: npt.DTypeLike, offset: int, count: int) -> npt.NDArray[Any]:
    """A part of a file as an array that is read when it is used; a plain ndarray, which slices faster than a memmap."""
    if count == 0:  # mmap refuses an empty range
        return np.empty(0, dtype)
    return np.memmap(file, dtype=dtype, mode="r", offset=offset, shape=(count,)).view(np.ndarray)


def _agree(sidecar: Sidecar, shard: Index) -> None:
    told = (sidecar.n_tokens, sidecar.n_documents, sidecar.dtype)
    found = (len(shard.tokens), shard.count, shard.dtype.name)
    if told != found:
        raise InputError(
            f"{part(shard.prefix, '.meta.json')} tells of {told[0]} tokens, {told[1]} documents, {told[2]}; "
            f"the shard holds {found[0]}, {found[1]}, {found[2]}: they do not belong together."
        )


def _settle(file: IO[bytes], *, durable: bool) -> None:
    file.flush()
    if durable:
        os.fsync(file.fileno())


def _told(failure: OSError, prefix: Path) -> Exception:
    """The failure as a sentence where it is the disk that is full, else as it was."""
    if failure.errno in (errno.ENOSPC, errno.EDQUOT):
        return Unhealthy(f"the disk is full: {part(prefix, '.bin')} could not be written. Free some, run it again.")
    return failure
