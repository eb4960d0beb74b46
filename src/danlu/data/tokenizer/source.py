"""Finding out what a path holds, and making a tokenizer of it."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import replace
from pathlib import Path

import tokenizers

from danlu.core.errors import InputError
from danlu.core.log import logger
from danlu.data.tokenizer.build import agree, build
from danlu.data.tokenizer.control import named, read
from danlu.data.tokenizer.engines import Bytes, Pieces, Ranked, optional
from danlu.data.tokenizer.forms import (
    END,
    LLAMA3_WORDS,
    PADDING,
    QWEN_WORDS,
    Ranks,
    byte_form,
    merges_form,
    pieces_form,
    ranks_form,
)
from danlu.data.tokenizer.tokenizer import MODEL, Tokenizer

KINDS = "tokenizer.json, vocab.json with merges.txt, a .tiktoken file, tokenizer.model"


def load(path: Path | str) -> Tokenizer:
    """The tokenizer that a path holds, or the built-in one of bytes for ``"byte"``.

    A path is a tokenizer.json, a SentencePiece .model, a tiktoken rank file (whatever its name), a vocab.json with its
    merges.txt, or a folder with one of them, also a run's folder. Names of control tokens are taken from the files
    beside it that Hugging Face keeps. What cannot be read, or has no token that ends a document, is refused.
    """
    if str(path) == "byte":
        return byte()
    path = Path(path)
    if not path.exists():
        raise InputError(f'{path}: no such tokenizer; give "byte", a tokenizer file or a folder that holds one')
    try:
        file = _file(path) if path.is_dir() else path
        if file.name in ("vocab.json", "merges.txt"):
            return merges(file.parent)
        if file.suffix == ".json":
            return fast(file)
        return ranks(file) if _is_ranks(file) else pieces(file)
    except OSError as error:
        raise InputError(f"{path}: the tokenizer cannot be read: {error.strerror} ({error.filename})") from error


def byte() -> Tokenizer:
    """The built-in tokenizer: ids 0 to 255 are the bytes, 256 ends a document, 257 is padding."""
    return Tokenizer(
        engine=Bytes(),
        sheet=byte_form().to_str(),
        control={END: 256, PADDING: 257},
        eos_id=256,
        bos_id=None,
        adds_bos=False,
        pad_id=257,
        pad_named=True,
        vocab_size=258,
    )


def fast(path: Path) -> Tokenizer:
    """The tokenizer of a ``tokenizer.json``."""
    read(path)  # says plainly when it is no JSON
    try:
        form = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise InputError(f"{path}: the tokenizers library cannot read it ({error})") from error
    return build(form, named(path.parent), where=path)


def merges(folder: Path) -> Tokenizer:
    """The tokenizer of GPT-2's two files, vocab.json and merges.txt; Qwen2's, where the folder says so."""
    for name in ("vocab.json", "merges.txt"):
        if not (folder / name).exists():
            raise InputError(f"{folder}: {name} is missing; vocab.json and merges.txt belong together")
    kind = str(read(folder / "tokenizer_config.json").get("tokenizer_class") or "GPT2Tokenizer").removesuffix("Fast")
    words = {"GPT2Tokenizer": None, "RobertaTokenizer": None, "Qwen2Tokenizer": QWEN_WORDS}
    if kind not in words:
        raise InputError(
            f"{folder}: how a {kind} cuts words is not known here ({', '.join(words)} are); use its tokenizer.json"
        )
    form = merges_form(folder / "vocab.json", folder / "merges.txt", words=words[kind])
    return build(form, named(folder), where=folder)


def ranks(path: Path) -> Tokenizer:
    """The tokenizer of a tiktoken rank file; whose it is, and so how words are cut, shows in how many ranks it has."""
    file = _ranks(path)
    engine = Ranked(file)
    logger.info(f"{path}: {len(file.ranks):,} ranks, so it is read as {file.maker}'s")
    said = named(path.parent)
    said = replace(said, eos=said.eos or file.eos, bos=said.bos or file.bos, ids={})
    if said.add_bos is None:
        said = replace(said, add_bos=file.bos is not None)
    return build(ranks_form(file), said, where=path, engine=engine)


def pieces(path: Path) -> Tokenizer:
    """The tokenizer of a SentencePiece model."""
    content = path.read_bytes()
    message = optional("sentencepiece.sentencepiece_model_pb2").ModelProto()
    try:
        message.ParseFromString(content)
        engine = Pieces(content)
    except InputError:
        raise
    except Exception as error:  # the libraries raise their own kinds
        raise InputError(f"{path}: neither a SentencePiece model nor a tiktoken rank file ({error})") from error
    spec = message.trainer_spec
    own = {
        role: message.pieces[i].piece if 0 <= i < len(message.pieces) else None
        for role, i in (("eos", spec.eos_id), ("bos", spec.bos_id), ("pad", spec.pad_id))
    }
    said = named(path.parent)
    said = replace(said, eos=said.eos or own["eos"], bos=said.bos or own["bos"], pad=said.pad or own["pad"])
    if said.add_bos is None and said.bos is not None:
        logger.info(f'{path}: a document begins with "{said.bos}"; say add_bos_token in tokenizer_config.json if not')
        said = replace(said, add_bos=True)
    tokenizer = build(pieces_form(message, where=path), said, where=path, engine=engine)
    agree(tokenizer, where=path)
    return replace(tokenizer, model=content)


def _file(folder: Path) -> Path:
    """The file of a folder that holds its tokenizer: the one Hugging Face would open, or the only other one."""
    if read(folder / "tokenizer_config.json").get("read_from") == MODEL and (folder / MODEL).exists():
        return folder / MODEL
    for name in ("tokenizer.json", "vocab.json"):
        if (folder / name).exists():
            return folder / name
    found = sorted([*folder.glob("*.tiktoken"), *folder.glob("*.model")])
    if len(found) == 1:
        return found[0]
    if found:
        raise InputError(f"{folder}: holds {' and '.join(f.name for f in found)}; name the file that is meant")
    if (folder / "model").is_dir():
        return _file(folder / "model")
    raise InputError(f"{folder}: holds no tokenizer; looked for {KINDS}")


def _is_ranks(path: Path) -> bool:
    """Whether a file is tiktoken's: lines of base64 and a number."""
    with open(path, "rb") as file:
        return re.match(rb"[A-Za-z0-9+/]+={0,2} \d+\s*$", file.readline(4096)) is not None


def _ranks(path: Path) -> Ranks:
    """The ranks of a file, with what their maker's code adds to them."""
    found: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            found[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise InputError(f"{path}: line {number} is not a token in base64 and its rank") from error
    size = len(found)
    if size == 128_000:
        return Ranks(
            maker="Llama 3",
            words=LLAMA3_WORDS,
            nfc=False,
            ranks=found,
            special={name: size + i for i, name in enumerate(_llama3())},
            eos="<|end_of_text|>",
            bos="<|begin_of_text|>",
        )
    if size == 151_643:
        names = [END, "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))]
        special = {name: size + i for i, name in enumerate(names)}
        return Ranks(maker="Qwen", words=QWEN_WORDS, nfc=True, ranks=found, special=special, eos=END, bos=None)
    raise InputError(
        f"{path}: {size:,} ranks; only Llama 3's (128,000) and Qwen's (151,643) are known, and a rank file does not say"
        " how words are cut; use the tokenizer.json of this tokenizer"
    )


def _llama3() -> list[str]:
    """The names of Llama 3's 256 control tokens, in the order of their ids."""
    spare = [f"<|reserved_special_token_{i}|>" for i in range(251)]
    return [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        *spare[:4],
        "<|start_header_id|>",
        "<|end_header_id|>",
        spare[4],
        "<|eot_id|>",
        *spare[5:],
    ]
