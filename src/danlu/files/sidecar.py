"""What stands beside a token shard: ``<prefix>.meta.json``, which tells whose ids they are and what went in."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from danlu.core.errors import InputError
from danlu.core.paths import write_whole

FORMAT = "danlu-tokens/1"
BLOCK = 1 << 20  # bytes read at once for a checksum


@dataclass(frozen=True, kw_only=True)
class Sidecar:
    """What the two files cannot say of themselves.

    tokenizer  fingerprint of the tokenizer that made the ids, its vocabulary and its end token
    xxh3_128   checksums of the two files, hexadecimal, under "bin" and "idx"
    sources    one entry a raw file that went in: its name, how many documents came of it, how many were rejected
    """

    tokenizer: str
    vocab_size: int
    eos_id: int
    dtype: str
    n_tokens: int
    n_documents: int
    xxh3_128: dict[str, str]
    created_by: str = "danlu"
    sources: list[dict[str, Any]] = field(default_factory=list)
    format: str = FORMAT

    @classmethod
    def read(cls, prefix: Path) -> Sidecar | None:
        """The sidecar beside a shard; None where there is none, as beside a shard of another tool."""
        file = part(prefix, ".meta.json")
        if not file.exists():
            return None
        try:
            facts = json.loads(file.read_bytes())
            if facts["format"] != FORMAT:
                raise InputError(
                    f"{file} is in format {facts['format']!r}; this danlu reads {FORMAT}. Tokenise the text again."
                )
            return cls(**{name: facts[name] for name in cls.__dataclass_fields__})
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise InputError(f"{file} is damaged ({error!r}); tokenise the text again.") from error

    def write(self, prefix: Path, *, durable: bool = True) -> None:
        """The sidecar stands beside the shard, whole."""
        file = part(prefix, ".meta.json")
        content = json.dumps(asdict(self), ensure_ascii=False, indent=1).encode(errors="backslashreplace") + b"\n"
        if durable:
            write_whole(file, content)
        else:
            file.write_bytes(content)


def prefix_of(path: Path) -> Path:
    """The shard's prefix: the path without its ``.bin`` or ``.idx``."""
    return path.with_name(path.name[:-4]) if path.name.endswith((".bin", ".idx")) else path


def part(prefix: Path, ending: str) -> Path:
    """The file of a shard that ends so: ``part(prefix, ".bin")``. A dot inside the prefix stays."""
    return prefix.with_name(prefix.name + ending)


def checksum(file: Path) -> str:
    """xxh3_128 of the file's bytes, hexadecimal, read in pieces."""
    state = xxhash.xxh3_128()
    with open(file, "rb") as stream:
        while block := stream.read(BLOCK):
            state.update(block)
    return state.hexdigest()
