"""Raw files to token shards: each file once, into a cache keyed by all that determines its ids."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from danlu import __version__
from danlu.core.errors import InputError
from danlu.corpus import entries
from danlu.corpus.batches import Batch, Encoder, gather
from danlu.corpus.encoders import Encoded, Encoders
from danlu.files import raw
from danlu.files.document import Document, Reject
from danlu.files.megatron import SMALL_VOCABULARY, Index, Writer, is_shard, verify
from danlu.files.sidecar import checksum
from danlu.files.stream import readable
from danlu.files.text import Split

OnBad = Literal["stop", "skip"]
POOL_FROM = 4 << 20  # bytes of raw files below which starting processes takes longer than it saves
WORD_EVERY = 10  # seconds between words about a file that takes long
Announce = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Raw:
    """A raw file: where it is, what it was when its content was hashed, and its name in the cache."""

    path: Path
    content: str
    facts: tuple[int, int, int]  # inode, size, time: only to notice a change while it is read
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What is to be said of a shard once its files are closed."""

    prefix: Path
    documents: int
    tokens: int
    rejects: int
    empty: int

    @classmethod
    def of(cls, shard: Index) -> Shard:
        """The account of an open shard; of another tool's, no record is known to have been left out."""
        sources = shard.sidecar.sources if shard.sidecar else []
        rejects, empty = (sum(int(source.get(what, 0)) for source in sources) for what in ("rejects", "empty"))
        return cls(prefix=shard.prefix, documents=shard.count, tokens=len(shard.tokens), rejects=rejects, empty=empty)


def tokenise(
    paths: Sequence[str | Path],
    tokenizer: Encoder,
    *,
    cache: Path,
    split: Split = "document",
    text: str = "text",
    on_bad: OnBad = "stop",
    workers: int = 1,
    announce: Announce,
) -> list[Path]:
    """Every document of the paths is in the shards whose prefixes are given back, in the order of the paths.

    paths    files (.txt, .jsonl, .parquet), shards, folders with all below them, globs
    split    what a document is in plain text; ``text``: which field or column holds it elsewhere
    on_bad   a bad record stops it all before anything is trained on (InputError with file, line, byte), or is skipped,
             counted, and listed beside the shard in ``rejects.jsonl``
    workers  processes that encode; the shards are the same to the byte however many

    A file whose content was tokenised before, by the same tokenizer and in the same way, is not read again but for its
    hash. Shards are passed on after a check that they are this tokenizer's. A file without text is named and left out;
    where nothing at all is left, InputError.
    """
    found = raw.find(paths, announce=announce)
    shards = {path: _pass(path, tokenizer, announce) for path in found if is_shard(path)}
    files = {path: _look(path, tokenizer, split, text, on_bad) for path in found if path not in shards}
    kept: dict[str, Shard] = {}
    missing: dict[str, Raw] = {}
    for file in files.values():
        shard, damage = entries.find(cache, file.key, tokenizer=tokenizer.fingerprint)
        if damage and file.key not in missing:
            announce(f"the tokens kept of {file.path} are damaged ({damage}); they are made again.")
            entries.drop(cache, file.key)
        if shard is None:
            missing.setdefault(file.key, file)
        else:
            kept[file.key] = Shard.of(shard)
    if missing:
        todo = list(missing.values())
        entries.clear(cache)
        if sum(file.facts[1] for file in todo) < POOL_FROM:
            workers = 1
        _tell_rules(len(todo), tokenizer, announce)
        batches = (batch for file in todo for batch in gather(_records(file.path, split, text, on_bad)))
        with Encoders(tokenizer, workers=workers) as encoders:
            results = encoders.map(batches)
            for file in todo:
                kept[file.key] = _build(file, results, tokenizer, cache, announce)
    made = {file.path for file in missing.values()}
    return _with_text([(path, shards.get(path) or kept[files[path].key]) for path in found], made, announce)


def _look(path: Path, tokenizer: Encoder, split: Split, text: str, on_bad: OnBad) -> Raw:
    kind = raw.kind_of(path) or "text"
    facts = _facts(path)
    try:
        content = checksum(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    key = entries.key(
        content=content,
        tokenizer=tokenizer.fingerprint,
        kind=kind,
        documents=split if kind == "text" else text,
        on_bad=on_bad,
    )
    return Raw(path=path, content=content, facts=facts, key=key)


def _facts(path: Path) -> tuple[int, int, int]:
    facts = readable(path)
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


def _pass(prefix: Path, tokenizer: Encoder, announce: Announce) -> Shard:
    """A shard made before: ours is known by its sidecar, another tool's is looked through."""
    shard = Index(prefix)
    if shard.sidecar is None:
        verify(prefix, vocab_size=tokenizer.vocab_size)
        announce(
            f"{prefix} has no sidecar, so which tokenizer made it is not known; its ids fit a vocabulary of "
            f"{tokenizer.vocab_size:,}, and are taken as this run's tokenizer's."
        )
        last = {
            int(shard.document(number)[-1]) for number in range(min(shard.count, 100)) if len(shard.document(number))
        }
        if last and tokenizer.eos_id not in last:
            others = f" and {len(last) - 1} others" if len(last) > 1 else ""
            announce(
                f"warning: its documents do not end with this tokenizer's end token (id {tokenizer.eos_id}) but with "
                f"id {min(last)}{others}; are they of another tokenizer?"
            )
        return Shard.of(shard)
    if shard.sidecar.tokenizer != tokenizer.fingerprint:
        raise InputError(
            f"{prefix} was made by another tokenizer (fingerprint {shard.sidecar.tokenizer[:16]}, this run's is "
            f"{tokenizer.fingerprint[:16]}); name that tokenizer in data.tokenizer, or give the raw text."
        )
    return Shard.of(shard)


def _tell_rules(files: int, tokenizer: Encoder, announce: Announce) -> None:
    begin = "begins with one begin token and " if tokenizer.begin else ""
    announce(f"tokenising {files} files: each document {begin}ends with one end token (id {tokenizer.eos_id}).")
    if SMALL_VOCABULARY <= tokenizer.vocab_size <= 65536:
        announce(
            f"ids of this vocabulary ({tokenizer.vocab_size:,}) are kept as int32, as Megatron's writer keeps them; "
            "its reader takes them for uint16 when it is given --per-dataset-sequences-path."
        )


def _records(path: Path, split: Split, text: str, on_bad: OnBad) -> Iterator[Document | Reject]:
    for record in raw.read(path, split=split, text=text):
        if isinstance(record, Reject) and on_bad == "stop":
            raise InputError(f"{record}. Mend it, or set data.on_bad to skip to leave bad records out.")
        yield record


def _build(
    file: Raw, results: Iterator[tuple[Batch, Encoded]], encoder: Encoder, cache: Path, announce: Announce
) -> Shard:
    with entries.build(cache, file.key) as folder:
        _write(file, results, encoder, folder, announce)
        if _facts(file.path) != file.facts:
            raise InputError(f"{file.path} changed while it was read; run it again when nothing writes to it.")
    return Shard.of(Index(cache / file.key / "tokens"))


def _write(
    file: Raw, results: Iterator[tuple[Batch, Encoded]], encoder: Encoder, folder: Path, announce: Announce
) -> None:
    """The shard of one file is in the folder: its batches up to the last, the list of its rejects, and its account."""
    started = word = time.monotonic()
    rejects = empty = 0
    with Writer(
        folder / "tokens",
        vocab_size=encoder.vocab_size,
        tokenizer=encoder.fingerprint,
        eos_id=encoder.eos_id,
        created_by=f"danlu {__version__}",
        sync_from=entries.SMALL,
    ) as writer:
        for batch, (ids, ends) in results:
            writer.add_many(ids, ends)
            empty += batch.empty
            rejects += len(batch.rejects)
            if batch.rejects:
                with open(folder / entries.REJECTS, "a", encoding="utf-8", errors="backslashreplace") as listed:
                    listed.writelines(json.dumps(asdict(r), ensure_ascii=False) + "\n" for r in batch.rejects)
            if batch.last:
                break
            if time.monotonic() - word > WORD_EVERY:
                word = time.monotonic()
                announce(f"{file.path}: {writer.n_tokens:,} tokens so far, {writer.n_tokens / (word - started):,.0f}/s")
        writer.sources.append(
            {
                "file": str(file.path),
                "content": file.content,
                "records": writer.n_documents + rejects + empty,
                "documents": writer.n_documents,
                "rejects": rejects,
                "empty": empty,
            }
        )


def _with_text(shards: list[tuple[Path, Shard]], made: set[Path], announce: Announce) -> list[Path]:
    """The prefixes of the shards that hold documents; what was made now, left out, or found empty is told of."""
    for path, shard in shards:
        left_out = f", {shard.empty:,} empty ones left out" if shard.empty else ""
        if shard.rejects:
            left_out += f", {shard.rejects:,} bad records left out (listed in {shard.prefix.parent / entries.REJECTS})"
        if not shard.tokens:
            announce(f"warning: {path} holds no text and is left out{left_out}")
        elif path in made or shard.rejects:
            announce(f"{path}: {shard.documents:,} documents, {shard.tokens:,} tokens{left_out}")
    kept = [shard for _, shard in shards if shard.tokens]
    if not kept:
        named = ", ".join(str(path) for path, _ in shards[:5]) + (", …" if len(shards) > 5 else "")
        listed = [shard.prefix.parent / entries.REJECTS for _, shard in shards if shard.rejects]
        why = f"; the first bad record: {_first(listed[0])}" if listed else ""
        raise InputError(f"there is no text to train on in {named}{why}.")
    documents, tokens = sum(shard.documents for shard in kept), sum(shard.tokens for shard in kept)
    old = len({path for path, _ in shards} - made)
    announce(f"{len(kept)} shards: {documents:,} documents, {tokens:,} tokens ({old} of them made before).")
    return [shard.prefix for shard in kept]


def _first(listed: Path) -> Reject:
    with open(listed, encoding="utf-8") as file:
        return Reject(**json.loads(file.readline()))
