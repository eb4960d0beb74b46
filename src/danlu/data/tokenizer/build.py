"""Making a tokenizer of a form and of what the files beside it say."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, models

from danlu.core.errors import InputError
from danlu.core.log import logger
from danlu.data.tokenizer.control import Named, settle
from danlu.data.tokenizer.engines import Engine, Fast
from danlu.data.tokenizer.forms import letters
from danlu.data.tokenizer.tokenizer import Tokenizer

# Texts on which a form should agree with the library that reads the original.
PROBES = (
    "The quick brown fox, isn't it? 1234567 x**2 == y[0];",
    "  two spaces  inside \t\n\n  and at the end  ",
    "话说宝玉道：“好妹妹，你别恼。”２０２６年",
    "naïve café Ωμέγα привет 안녕 かな 🙂👩‍👩‍👧 \u00a0\u200b e\u0301 ﬁ",
    "aaaaaaaaaaaaaaaa ---- ==== ......",
    "<s></s><unk><|endoftext|>",
    "a\r\nb",
    "",
)


def build(form: tokenizers.Tokenizer, said: Named, *, where: Path, engine: Engine | None = None) -> Tokenizer:
    """The tokenizer of a form, with what the files beside it say of control tokens; run by the engine, where given.

    Truncation, padding and dropout, which a form can carry, are switched off: they would lose or change ids.
    """
    form.no_truncation()
    form.no_padding()
    if getattr(form.model, "dropout", None):
        form.model.dropout = None
        logger.info(f"{where}: its BPE dropout is switched off, so that the same text always has the same ids")
    _add(form, said, control=engine is not None, where=where)
    marked = [token.content for token in form.get_added_tokens_decoder().values() if token.special]
    names = settle(said, form.get_vocab(with_added_tokens=True), marked, where=where)
    form.add_special_tokens([AddedToken(n, special=True, normalized=False) for n in dict.fromkeys(names.values())])

    tokens = form.get_vocab(with_added_tokens=True)
    ids = {role: tokens[name] for role, name in names.items()}
    before = _before(form)
    if len(before) == 1:
        ids.setdefault("bos", before[0])
    adds = said.add_bos if said.add_bos is not None else before == [ids.get("bos")]
    form.post_processor = None
    control = {t.content: i for i, t in form.get_added_tokens_decoder().items() if t.special}
    sheet = form.to_str()
    tokenizer = Tokenizer(
        engine=engine or Fast(sheet),
        sheet=sheet,
        control=dict(sorted(control.items(), key=lambda pair: pair[1])),
        eos_id=ids["eos"],
        bos_id=ids.get("bos"),
        adds_bos=bool(adds) and "bos" in ids,
        pad_id=ids.get("pad", ids["eos"]),
        pad_named="pad" in ids,
        vocab_size=max(tokens.values()) + 1,
        chat_template=said.chat_template,
    )
    _guard(tokenizer, unknown=_unknown(form), where=where)
    _losses(form, where=where)
    return tokenizer


def _add(form: tokenizers.Tokenizer, said: Named, *, control: bool, where: Path) -> None:
    """Tokens that only the files beside it know are in the form, with the ids these files give.

    control: all of them are control tokens, since another engine, which does not know them, makes the ids.
    """
    known = form.get_added_tokens_decoder()
    for i, (content, special) in sorted(said.added.items()):
        if i in known and known[i].content == content:
            continue
        if special or control:
            form.add_special_tokens([AddedToken(content, special=True, normalized=False)])
        else:
            form.add_tokens([AddedToken(content, special=False, normalized=False)])
        if form.token_to_id(content) != i:
            raise InputError(
                f'{where}: the files beside it give "{content}" the id {i}, but its id here is'
                f" {form.token_to_id(content)}; these files do not belong together"
            )


def _before(form: tokenizers.Tokenizer) -> list[int]:
    """What the form itself puts before a text."""
    whole = form.encode("a", add_special_tokens=True).ids
    plain = form.encode("a", add_special_tokens=False).ids
    start = next((k for k in range(len(whole)) if whole[k : k + len(plain)] == plain), 0)
    return whole[:start]


def _unknown(form: tokenizers.Tokenizer) -> str | None:
    """The name of the token that stands for what the model does not know."""
    if isinstance(form.model, models.Unigram):
        unknown = json.loads(form.to_str())["model"]["unk_id"]
        return None if unknown is None else form.id_to_token(unknown)
    return getattr(form.model, "unk_token", None)


def _guard(tokenizer: Tokenizer, *, unknown: str | None, where: Path) -> None:
    """No control token is made out of its own name in a text; a tokenizer whose model would do so is refused.

    The unknown token is left aside: it may well stand for the characters of its name.
    """
    ids = {i for name, i in tokenizer.control.items() if name != unknown}
    for name, row in zip(tokenizer.control, tokenizer.encode_batch(list(tokenizer.control))):
        if not ids.isdisjoint(row):
            raise InputError(
                f'{where}: the text "{name}" would become a control token, whatever is asked; such a tokenizer cannot'
                " be trusted with raw text"
            )


def _losses(form: tokenizers.Tokenizer, *, where: Path) -> None:
    """A byte-level vocabulary that lacks bytes is announced: text with them comes out shorter."""
    vocabulary = form.get_vocab(with_added_tokens=False)
    if "ByteLevel" in repr(form.pre_tokenizer) and getattr(form.model, "unk_token", None) is None:
        missing = [byte for byte, letter in letters().items() if letter not in vocabulary]
        if missing:
            first = ", ".join(f"0x{byte:02X}" for byte in missing[:4])
            logger.warning(
                f"{where}: {len(missing)} of the 256 bytes have no token ({first}{', …' if len(missing) > 4 else ''});"
                " text with them is lost, and nothing in this tokenizer marks the place"
            )


def agree(tokenizer: Tokenizer, *, where: Path) -> None:
    """It is announced where the saved form, which other tools read, gives other ids than the original does here."""
    form = Fast(tokenizer.sheet)
    added = json.loads(tokenizer.sheet)["added_tokens"]
    inside = [f"a{token['content']}b {token['content']} c" for token in added if not token["special"]]
    for text in (*PROBES, *inside):
        if tokenizer.encode(text) != form.encode(text):
            logger.warning(
                f"{where}: no tokenizer.json can say quite the same; the one saved with a model gives other ids on, for"
                f" example, {text!r}, to tools that read it. danlu itself keeps to the original"
            )
            return
