"""Other forms of a tokenizer, written as a form of the tokenizers library, which ``tokenizer.json`` is the text of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from danlu.core.errors import InputError

END, PADDING = "<|endoftext|>", "<|padding|>"
SPACE = "▁"  # how SentencePiece writes a space

# How a text is cut into words before merging. GPT-2's is the library's own default; these are the two others that
# rank files are met with, word for word as their makers publish them (so that other libraries know them again).
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")


def byte_form() -> tokenizers.Tokenizer:
    """The byte tokenizer: id = byte, then the end token at 256 and padding at 257."""
    form = tokenizers.Tokenizer(models.BPE(vocab={letter: byte for byte, letter in letters().items()}, merges=[]))
    form.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    form.decoder = decoders.ByteLevel()
    form.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (END, PADDING)])
    return form


def letters() -> dict[int, str]:
    """The letter by which byte-level vocabularies write each byte: itself where printable, else from 256 on (GPT-2)."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte if byte in plain else 256 + hidden.index(byte)) for byte in range(256)}


def merges_form(vocabulary: Path, merges: Path, *, words: str | None = None) -> tokenizers.Tokenizer:
    """The form of a vocab.json and a merges.txt; words cuts the text first, GPT-2's own pattern where None."""
    try:
        model = models.BPE.from_file(str(vocabulary), str(merges))
    except Exception as error:  # the library raises nothing narrower
        raise InputError(f"{vocabulary} and {merges.name}: not a byte-level BPE ({error})") from error
    form = tokenizers.Tokenizer(model)
    form.pre_tokenizer = byte_level(words)
    form.decoder = decoders.ByteLevel()
    if words is not None:
        form.normalizer = normalizers.NFC()
    return form


def byte_level(words: str | None) -> pre_tokenizers.PreTokenizer:
    """A text is cut into words, each written in bytes; with GPT-2's own pattern where None."""
    if words is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    cut = pre_tokenizers.Split(Regex(words), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """A rank file, and what its maker's code adds to it: how words are cut, control tokens, normalisation."""

    maker: str
    words: str
    nfc: bool
    ranks: dict[bytes, int]
    special: dict[str, int]
    eos: str
    bos: str | None


def ranks_form(file: Ranks) -> tokenizers.Tokenizer:
    """The form of a rank file: a merge for every way a token is made of two others, in the order of the ranks."""
    table = letters()
    spelled = {token: "".join(table[byte] for byte in token) for token in file.ranks}
    merges: list[tuple[str, str]] = []
    for token in sorted(file.ranks, key=file.ranks.__getitem__):
        halves = [(token[:k], token[k:]) for k in range(1, len(token)) if token[:k] in spelled and token[k:] in spelled]
        if len(halves) > 1:
            halves.sort(key=lambda pair: (file.ranks[pair[0]], file.ranks[pair[1]]))
        merges.extend((spelled[left], spelled[right]) for left, right in halves)
    vocabulary = {spelled[token]: rank for token, rank in file.ranks.items()}
    form = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    if file.nfc:
        form.normalizer = normalizers.NFC()
    form.pre_tokenizer = byte_level(file.words)
    form.decoder = decoders.ByteLevel()
    for name, rank in sorted(file.special.items(), key=lambda pair: pair[1]):
        form.add_special_tokens([AddedToken(name, special=True, normalized=False)])
        if form.token_to_id(name) != rank:
            raise InputError(f"the ranks of a {file.maker} file end at {form.token_to_id(name)}, not at {rank}")
    return form


def pieces_form(model: Any, *, where: Path) -> tokenizers.Tokenizer:
    """The form of a SentencePiece model, given as its protocol message; kinds that have none are refused."""
    unigram, bpe = 1, 2  # the numbers are those of sentencepiece_model.proto
    trainer, rules = model.trainer_spec, model.normalizer_spec
    if trainer.model_type not in (unigram, bpe):
        raise InputError(f"{where}: a SentencePiece model of words or characters; only unigram and BPE are read")
    if trainer.treat_whitespace_as_suffix or not rules.escape_whitespaces:
        raise InputError(f"{where}: its way of writing spaces has no equal in tokenizer.json; use a tokenizer.json")
    normal, unknown, control, user, byte = 1, 2, 3, 4, 6  # 5 is unused
    pieces = [(piece.piece, piece.score, piece.type) for piece in model.pieces]
    names = {kind: [name for name, _, k in pieces if k == kind] for kind in (unknown, control, user)}
    fallback = bool(trainer.byte_fallback)
    if trainer.model_type == unigram:
        # Scores below the lowest would move the price of an unknown character, so bytes can only be made as dear as it.
        lowest = min(score for _, score, kind in pieces if kind == normal)
        scores = [(name, lowest if kind == byte else score) for name, score, kind in pieces]
        form = tokenizers.Tokenizer(models.Unigram(scores, unk_id=trainer.unk_id, byte_fallback=fallback))
    else:
        usable = {name: (score, i) for i, (name, score, kind) in enumerate(pieces) if kind in (normal, user)}
        form = tokenizers.Tokenizer(
            models.BPE(
                vocab={name: i for i, (name, _, _) in enumerate(pieces)},
                merges=list(_merges(usable)),
                unk_token=names[unknown][0],
                fuse_unk=True,
                byte_fallback=fallback,
            )
        )
    form.normalizer = normalizers.Sequence(list(_rules(rules)))
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    form.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if rules.add_dummy_prefix else steps)
    form.add_special_tokens([AddedToken(n, special=True, normalized=False) for n in names[unknown] + names[control]])
    form.add_tokens([AddedToken(n, special=False, normalized=False) for n in names[user]])
    return form


def _merges(usable: Mapping[str, tuple[float, int]]) -> Iterator[tuple[str, str]]:
    """A merge for every way a piece is made of two others, best score first."""
    for name in sorted(usable, key=lambda piece: (-usable[piece][0], usable[piece][1])):
        halves = [(name[:k], name[k:]) for k in range(1, len(name)) if name[:k] in usable and name[k:] in usable]
        yield from sorted(halves, key=lambda pair: (usable[pair[0]][1], usable[pair[1]][1]))


def _rules(rules: Any) -> Iterator[normalizers.Normalizer]:
    """SentencePiece's normalisation, step by step."""
    if rules.precompiled_charsmap:
        yield normalizers.Precompiled(rules.precompiled_charsmap)
    if rules.remove_extra_whitespaces:
        yield normalizers.Replace(Regex(r"\A +| +\z"), "")  # spaces only; the library's Strip takes line ends too
        yield normalizers.Replace(Regex(" {2,}"), " ")
    if rules.add_dummy_prefix:
        yield normalizers.Prepend(SPACE)
    yield normalizers.Replace(" ", SPACE)
