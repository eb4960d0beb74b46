"""Raw files become a run's sources: tokenised once, opened, split."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import xxhash

from danlu.core.errors import InputError
from danlu.core.world import World, once
from danlu.corpus.entries import REJECTS
from danlu.corpus.tokenise import tokenise
from danlu.data.source import Corpus, Set, Weighted
from danlu.data.split import split
from danlu.data.store import Shards
from danlu.data.tokenizer import Tokenizer
from danlu.files.sidecar import Sidecar, part


class LeftOut(NamedTuple):
    """How many records of a file were bad and are left out, and where they are listed."""

    file: str
    records: int
    listed: str


@dataclass(frozen=True, slots=True)
class Sets:
    """What a model learns from, and what it is held against (may be empty).

    identity  changes with any token, boundary or weight that is learned from, and with their order; not with a path
    held      the same of texts that are only held against; "" where a share of the documents is
    left_out  files of which bad records were left out
    """

    train: list[Set]
    validation: list[Set]
    identity: str
    held: str
    left_out: tuple[LeftOut, ...] = ()


def open_sets(
    settings: Corpus,
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    cache: Path,
    world: World,
    announce: Callable[[str], None],
) -> Sets:
    """The sources of a recipe's `data`: files that were not tokenised yet are now, by the first rank, kept in `cache`.

    Plain paths are one source together; {path, weight} entries are a source each.
    """

    def prepare(paths: list[str]) -> list[Path]:
        return once(
            world,
            lambda: tokenise(
                paths,
                tokenizer,
                cache=cache,
                split=settings.split,
                text=settings.text,
                on_bad=settings.on_bad,
                workers=max(settings.workers, 1),
                announce=announce,
            ),
        )

    def opened(prefixes: list[Path]) -> Shards:
        return Shards(prefixes, tokenizer=tokenizer.fingerprint, vocab_size=vocab_size)

    weighted = [entry for entry in settings.train if isinstance(entry, Weighted)]
    if weighted and len(weighted) < len(settings.train):
        raise InputError("data.train: either every entry has a weight, as {path: …, weight: …}, or none has")
    groups = [([entry.path], entry.weight) for entry in weighted] or [([str(e) for e in settings.train], 1.0)]
    names = _names([entry.path for entry in weighted] or ["train"])
    share = settings.validation if isinstance(settings.validation, float | int) else 0.0
    train, validation, identity, held_id = [], [], xxhash.xxh3_128(), ""
    left_out: list[LeftOut] = []
    for name, (paths, weight) in zip(names, groups, strict=True):
        prefixes = prepare(paths)
        whole = opened(prefixes)
        left_out += _left_out(prefixes)
        identity.update(repr((name, weight, share, [_identity(prefix) for prefix in prefixes])).encode())
        learnt, held = split(whole, share)
        train.append(Set(name=name, stream=learnt, weight=weight))
        if held is not None:
            validation.append(Set(name=name, stream=held))
    if isinstance(settings.validation, list):
        prefixes = prepare(settings.validation)
        validation = [Set(name="validation", stream=opened(prefixes))]
        left_out += _left_out(prefixes)
        held_id = xxhash.xxh3_128_hexdigest(repr([_identity(prefix) for prefix in prefixes]).encode())
    return Sets(train, validation, identity.hexdigest(), held_id, tuple(left_out))


def _left_out(prefixes: list[Path]) -> Iterator[LeftOut]:
    for prefix in prefixes:
        sidecar = Sidecar.read(prefix)
        for source in sidecar.sources if sidecar is not None else ():
            if source.get("rejects"):
                yield LeftOut(str(source["file"]), int(source["rejects"]), str(prefix.parent / REJECTS))


def _identity(prefix: Path) -> str:
    """A hash of a shard's tokens and boundaries; of another tool's shard, which carries none, of its index."""
    sidecar = Sidecar.read(prefix)
    if sidecar is not None:
        return "".join(sidecar.xxh3_128[kind] for kind in ("bin", "idx"))
    return xxhash.xxh3_128(part(prefix, ".idx").read_bytes()).hexdigest()


def _names(paths: list[str]) -> list[str]:
    """A short name for each source: its file's, with a number where two are alike."""
    stems = [re.sub(r"[^\w.-]+", "-", Path(path).name.split(".")[0]) or "source" for path in paths]
    return [stem if stems.count(stem) == 1 else f"{stem}-{number}" for number, stem in enumerate(stems)]
