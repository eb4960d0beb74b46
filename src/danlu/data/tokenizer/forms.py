"""Other forms of a tokenizer, written as the text of a ``tokenizer.json``."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

END, PADDING = "<|endoftext|>", "<|padding|>"


def byte_sheet() -> str:
    """The byte tokenizer: id = byte, then the end token at 256 and padding at 257."""
    fast = tokenizers.Tokenizer(models.BPE(vocab={shown(b): b for b in range(256)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (END, PADDING)])
    return fast.to_str()


def shown(byte: int) -> str:
    """The character by which byte-level vocabularies write a byte (GPT-2's table: printable bytes are themselves)."""
    if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255:
        return chr(byte)
    hidden = [b for b in range(256) if not (33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255)]
    return chr(256 + hidden.index(byte))
