"""What turns text into ids: one class a library, all with the same four verbs."""

from __future__ import annotations

import importlib
import json
import re
import unicodedata
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import tokenizers
from tokenizers import models

from danlu.core.errors import InputError
from danlu.data.tokenizer.forms import Ranks, ranks_form

NOWHERE = "\U0010ffff"  # a code point that Unicode gives to no character, ever
BLANK = 100_000  # characters of white space in a row; tiktoken 0.14 overflows its stack between 300,000 and a million


class Engine(Protocol):
    """Ordinary text to ids and back; can be pickled; strings of control tokens in the text are ordinary text."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with nothing put before or after it."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, as ``encode`` gives them."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids that are no control tokens; bytes that are not UTF-8 become U+FFFD."""
        ...


class Bytes:
    """Ids 0 to 255 are the bytes of the text in UTF-8."""

    def encode(self, text: str) -> list[int]:
        return list(encoded(text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(encoded(text)) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


class Fast:
    """A ``tokenizer.json``, run by Hugging Face's tokenizers."""

    def __init__(self, sheet: str) -> None:
        self._sheet = sheet
        self._tokenizer = tokenizers.Tokenizer.from_str(sheet)
        if isinstance(self._tokenizer.model, models.Unigram):
            self._tokenizer = tokenizers.Tokenizer.from_str(_out_of_reach(sheet))
        # Not written in the file, so it must be said each time: special tokens are not looked for in the text.
        self._tokenizer.encode_special_tokens = True

    def __reduce__(self) -> tuple[type[Fast], tuple[str]]:
        return Fast, (self._sheet,)

    def encode(self, text: str) -> list[int]:
        try:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        except TypeError as error:
            raise surrogates([text]) from error

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            return [row.ids for row in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
        except TypeError as error:
            raise surrogates(texts) from error

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


class Pieces:
    """A SentencePiece model, run by Google's sentencepiece."""

    def __init__(self, model: bytes) -> None:
        self._model = model
        self._processor = optional("sentencepiece").SentencePieceProcessor(model_proto=model)

    def __reduce__(self) -> tuple[type[Pieces], tuple[bytes]]:
        return Pieces, (self._model,)

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(encoded(text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._processor.encode(encoded(text)) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode(list(ids))


class Ranked:
    """A rank file, run by OpenAI's tiktoken: the fastest of them."""

    def __init__(self, file: Ranks) -> None:
        self._file = file
        self._encoding = optional("tiktoken").Encoding(
            file.maker, pat_str=file.words, mergeable_ranks=file.ranks, special_tokens=file.special
        )

    def __reduce__(self) -> tuple[type[Ranked], tuple[Ranks]]:
        return Ranked, (self._file,)

    def encode(self, text: str) -> list[int]:
        encoded(text)  # half a surrogate pair is refused here; the library would put another character in its place
        if self._file.nfc:
            text = unicodedata.normalize("NFC", text)
        if len(text) > BLANK and any(run.end() - run.start() > BLANK for run in re.finditer(r"\s+", text)):
            return self._patient.encode(text)
        return self._encoding.encode_ordinary(text)

    @cached_property
    def _patient(self) -> Fast:
        """The same ids by the other library, for texts with blanks so long that tiktoken would abort the process."""
        return Fast(ranks_form(self._file).to_str())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return self._encoding.decode_bytes(list(ids)).decode("utf-8", errors="replace")


def _out_of_reach(sheet: str) -> str:
    """The sheet of a unigram model with its control tokens renamed to what no text holds.

    Such a model matches any piece of its vocabulary in the text, also "</s>", whatever is asked about special tokens.
    """
    facts = json.loads(sheet)
    names = {token["content"] for token in facts["added_tokens"] if token["special"]}
    facts["added_tokens"] = [token for token in facts["added_tokens"] if not token["special"]]
    facts["model"]["vocab"] = [[NOWHERE + n if n in names else n, score] for n, score in facts["model"]["vocab"]]
    return json.dumps(facts)


def optional(library: str) -> Any:
    """A library that only some tokenizers need; where it is missing, the refusal says how to get it."""
    try:
        return importlib.import_module(library)
    except ImportError as error:
        name = library.partition(".")[0]
        raise InputError(
            f"this tokenizer needs the library {name}: pip install 'danlu[tokenizers]', or give a tokenizer.json"
        ) from error


def encoded(text: str) -> bytes:
    """The text in UTF-8; a text with half of a surrogate pair, which UTF-8 cannot hold, is refused."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise surrogates([text]) from error


def surrogates(texts: Sequence[Any]) -> InputError:
    """The refusal of the first text that is not one: half of a surrogate pair, or no string at all."""
    for text in texts:
        if not isinstance(text, str):
            return InputError(f"only a string can be tokenised, not a {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            return InputError(
                f"character {error.start} of a text is {text[error.start]!r}, half of a surrogate pair, which is no"
                " text; write U+FFFD in its place or drop it"
            )
    return InputError("a text could not be tokenised")
