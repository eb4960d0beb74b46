"""Token shards for the tests of this room, written byte by byte here and not by the code under test."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

CODES = {"u2": 8, "i4": 4, "i8": 5}


def shard(
    prefix: Path, documents: Sequence[Sequence[int]], *, dtype: str = "u2", tokenizer: str | None = None, vocab: int = 0
) -> Path:
    """A shard of these documents; with a sidecar where a tokenizer's fingerprint is given."""
    lengths = np.array([len(each) for each in documents], "<i4")
    pointers = (np.cumsum(lengths.astype("<i8")) - lengths) * np.dtype(dtype).itemsize
    tokens = np.concatenate([np.empty(0, "<" + dtype), *(np.array(each, "<" + dtype) for each in documents)])
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, CODES[dtype], len(documents), len(documents) + 1)
    order = np.arange(len(documents) + 1, dtype="<i8")
    Path(f"{prefix}.bin").write_bytes(tokens.tobytes())
    Path(f"{prefix}.idx").write_bytes(head + lengths.tobytes() + pointers.astype("<i8").tobytes() + order.tobytes())
    if tokenizer is not None:
        facts = {
            "tokenizer": tokenizer,
            "vocab_size": vocab,
            "eos_id": 0,
            "dtype": np.dtype(dtype).name,
            "n_tokens": len(tokens),
            "n_documents": len(documents),
            "xxh3_128": {},
            "created_by": "test",
            "sources": [],
            "format": "danlu-tokens/1",
        }
        Path(f"{prefix}.meta.json").write_text(json.dumps(facts))
    return prefix


def documents(lengths: Sequence[int], *, first: int = 1, eos: int = 0) -> list[list[int]]:
    """Documents of these lengths; ids count on from ``first`` and never repeat, the last of each is the end token."""
    made, at = [], first
    for length in lengths:
        made.append([*range(at, at + length - 1), eos])
        at += length - 1
    return made
