"""How many tokens a tokenizer needs for text, script by script."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from danlu.data.tokenizer.tokenizer import Tokenizer

# Scripts written without spaces: their words are not to be seen, so their characters are counted.
UNSPACED = frozenset({"Han", "Hiragana", "Katakana", "Thai", "Lao", "Khmer", "Myanmar"})


@dataclass(frozen=True, kw_only=True)
class Fertility:
    """What the lines of one script came to; words are characters where the script is written without spaces."""

    script: str
    size: int
    tokens: int
    words: int
    spaced: bool

    @property
    def bytes_per_token(self) -> float:
        """Bytes of UTF-8 that one token stands for."""
        return self.size / self.tokens

    @property
    def tokens_per_word(self) -> float:
        """Tokens that a word takes, or a character where the script has no spaces."""
        return self.tokens / max(self.words, 1)


def fertility(tokenizer: Tokenizer, texts: Iterable[str]) -> list[Fertility]:
    """The fertility of each script that leads some line of the texts, the one with most bytes first."""
    sizes, tokens, words = Counter[str](), Counter[str](), Counter[str]()
    for text in texts:
        lines = text.splitlines(keepends=True)
        for line, ids in zip(lines, tokenizer.encode_batch(lines)):
            script = leading(line)
            sizes[script] += len(line.encode("utf-8"))
            tokens[script] += len(ids)
            if script == "None":
                continue
            words[script] += sum(map(str.isalpha, line)) if script in UNSPACED else len(line.split())
    return [
        Fertility(
            script=name,
            size=size,
            tokens=tokens[name],
            words=words[name],
            spaced=name not in UNSPACED,
        )
        for name, size in sizes.most_common()
        if tokens[name]
    ]


def leading(line: str) -> str:
    """The script most letters of a line belong to, as Unicode names it ("Han" for CJK); "None" without letters."""
    found = Counter(_script(letter) for letter in line if letter.isalpha())
    return found.most_common(1)[0][0] if found else "None"


@lru_cache(maxsize=4096)
def _script(letter: str) -> str:
    name = unicodedata.name(letter, "none").split(" ")[0].split("-")[0]
    return "Han" if name == "CJK" else name.capitalize()
