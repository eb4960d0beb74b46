"""A tokenizer: text to ids, and documents with their begin and end."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from danlu.core.paths import write_whole
from danlu.data.tokenizer.engines import Engine

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)  # what ``save`` writes of every tokenizer
MODEL = "tokenizer.model"
UNKNOWN = "\ufffd"  # shown for an id that no token has


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """Text to ids and back; it can be pickled and handed to other processes.

    sheet     the whole of it as the text of a Hugging Face ``tokenizer.json``, whatever it was read from
    control   name and id of every control token; none of them is ever made out of text
    bos_id    the begin token, None where there is none; ``adds_bos`` says whether a document starts with it
    eos_id    the token that ends a document
    pad_id    the padding token; where none is named it is ``eos_id``, so padding is told by place, never by id
    pad_named whether the tokenizer itself names a padding token
    chat_template, model   its template for conversations, and the SentencePiece model it was read from: both are kept
              for whoever opens the saved folder, and touch no ids
    """

    engine: Engine
    sheet: str
    control: dict[str, int]
    eos_id: int
    bos_id: int | None
    adds_bos: bool
    pad_id: int
    pad_named: bool
    vocab_size: int
    chat_template: str | None = None
    model: bytes | None = None

    @property
    def rule(self) -> str:
        """What is put round a document, as a sentence for the log."""
        names = {i: name for name, i in self.control.items()}
        start = "".join(f'"{names[i]}" ({i})' for i in self.begin)
        begins = f"begins with {start} and" if start else "begins with no token of its own and"
        return f'a document {begins} ends with exactly one "{names[self.eos_id]}" ({self.eos_id})'

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that determines ids: the same wherever the tokenizer is kept and however often saved."""
        sheet = json.loads(self.sheet)
        if sheet["model"]["type"] == "Unigram":  # the library's reader may change the last digit of a score
            sheet["model"]["vocab"] = [[piece, f"{score:.9g}"] for piece, score in sheet["model"]["vocab"]]
        facts = {
            "normalizer": sheet["normalizer"],
            "pre_tokenizer": sheet["pre_tokenizer"],
            "model": sheet["model"],
            # Special tokens are never looked for in text, so only their ids count; the others' spacing rules do too.
            "added": [t if not t["special"] else [t["id"], t["content"]] for t in sheet["added_tokens"]],
            "control": self.control,
            "document": [self.bos_id if self.adds_bos else None, self.eos_id, self.pad_id],
        }
        text = json.dumps(_stated(facts), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        return hashlib.sha256(text.encode("utf-8")).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The ids of a text as ordinary text: no begin, no end; strings like "<|endoftext|>" in it are text."""
        return self.engine.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, as ``encode`` gives them; faster for many."""
        return self.engine.encode_batch(texts)

    def document(self, text: str) -> list[int]:
        """The ids of a whole document: the begin token if this tokenizer adds one, the text, one end token."""
        return [*self.begin, *self.encode(text), self.eos_id]

    @property
    def begin(self) -> list[int]:
        """What a document, and a prompt, starts with: the begin token, or nothing."""
        return [self.bos_id] if self.adds_bos and self.bos_id is not None else []

    def decode(self, ids: Sequence[int], *, control: bool = False) -> str:
        """The text of ids. Control tokens are left out, or shown by name; an id that no token has shows as U+FFFD."""
        names = {i: name for name, i in self.control.items()}
        parts: list[str] = []
        ordinary: list[int] = []

        def settle() -> None:
            if ordinary:
                parts.append(self.engine.decode(ordinary))
                ordinary.clear()

        for i in ids:
            if i in names:
                if control:
                    settle()
                    parts.append(names[i])
            elif 0 <= i < self.vocab_size:
                ordinary.append(int(i))
            else:
                settle()
                parts.append(UNKNOWN)
        settle()
        return "".join(parts)

    def save(self, folder: Path | str) -> None:
        """The folder holds the files from which Hugging Face's AutoTokenizer, and ``load``, make the same ids."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        names = {i: name for name, i in self.control.items()}
        special = {"eos_token": names[self.eos_id]}
        if self.bos_id is not None:
            special["bos_token"] = names[self.bos_id]
        if self.pad_named:
            special["pad_token"] = names[self.pad_id]
        sheet = json.loads(self.sheet)
        sheet["post_processor"] = self._template(names)
        settings: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": self.adds_bos,
            "clean_up_tokenization_spaces": False,
            **special,
        }
        if self.chat_template is not None:
            settings["chat_template"] = self.chat_template
        if self.model is not None:
            write_whole(folder / MODEL, self.model)
            settings["read_from"] = MODEL  # tells ``load`` that of the two files this is the original
        for name, content, indent in zip(FILES, (sheet, settings, special), (None, 2, 2)):
            text = json.dumps(content, ensure_ascii=False, indent=indent)
            write_whole(folder / name, (text + "\n").encode("utf-8"))

    def _template(self, names: dict[int, str]) -> dict[str, Any] | None:
        """The part of ``tokenizer.json`` that puts the begin token first, where this tokenizer adds one."""
        if not self.adds_bos or self.bos_id is None:
            return None
        name = names[self.bos_id]
        begin = {"SpecialToken": {"id": name, "type_id": 0}}
        texts = [{"Sequence": {"id": which, "type_id": kind}} for which, kind in (("A", 0), ("B", 1))]
        return {
            "type": "TemplateProcessing",
            "single": [begin, texts[0]],
            "pair": [begin, *texts],
            "special_tokens": {name: {"id": name, "ids": [self.bos_id], "tokens": [name]}},
        }


def _stated(value: Any) -> Any:
    """The same facts without those that are off or absent: a newer library's unused switch changes nothing."""
    if isinstance(value, dict):
        return {k: _stated(v) for k, v in value.items() if v is not None and v is not False}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_stated(v) for v in value]
    return value
