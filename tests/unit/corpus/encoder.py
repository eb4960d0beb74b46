"""A tokenizer of bytes that does as it is told by the text: dies, raises, says something, or takes its time."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from danlu.core.errors import InputError


@dataclass(frozen=True)
class Told:
    vocab_size: int = 258
    eos_id: int = 256
    begin: list[int] = field(default_factory=list)
    fingerprint: str = "bytes"
    pause: float = 0.2

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        for text in texts:
            if "KILL" in text:
                os.kill(os.getpid(), 9)
            if "EXIT" in text:
                os._exit(3)
            if "RAISE" in text:
                raise InputError("told to raise")
            if "SAY" in text:
                print("said", flush=True)
            if "WAIT" in text:
                time.sleep(self.pause)
            if "BIG" in text:
                return [[self.vocab_size] for _ in texts]
        return [list(text.encode()) for text in texts]
