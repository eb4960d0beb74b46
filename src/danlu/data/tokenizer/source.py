"""Finding out what a path holds, and making a tokenizer of it."""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers import AddedToken

from danlu.core.errors import InputError
from danlu.core.log import logger
from danlu.data.tokenizer.control import Named, named, read, settle
from danlu.data.tokenizer.engines import Bytes, Engine, Fast
from danlu.data.tokenizer.forms import END, PADDING, byte_sheet
from danlu.data.tokenizer.tokenizer import Tokenizer


def load(path: Path | str) -> Tokenizer:
    """The tokenizer that a path holds, or the built-in one of bytes for ``"byte"``.

    A path is a ``tokenizer.json``, or a folder with one; names of control tokens are taken from the files beside it.
    """
    if str(path) == "byte":
        return byte()
    path = Path(path)
    if not path.exists():
        raise InputError(f'{path}: no such tokenizer; give "byte", a tokenizer file or a folder that holds one')
    if path.is_dir():
        if (path / "tokenizer.json").exists():
            return fast(path / "tokenizer.json")
        raise InputError(f"{path}: holds no tokenizer (tokenizer.json was looked for)")
    if path.suffix == ".json":
        return fast(path)
    raise InputError(f"{path}: not a tokenizer file that is known here")


def byte() -> Tokenizer:
    """The built-in tokenizer: ids 0 to 255 are the bytes, 256 ends a document, 257 is padding."""
    return Tokenizer(
        engine=Bytes(),
        sheet=byte_sheet(),
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
    return from_fast(form, named(path.parent), where=path)


def from_fast(form: tokenizers.Tokenizer, said: Named, *, where: Path, engine: Engine | None = None) -> Tokenizer:
    """The tokenizer of a form that the tokenizers library holds, with what the files beside it say of control tokens.

    Truncation, padding and dropout, which such a file can carry, are switched off: they would lose or change ids.
    """
    form.no_truncation()
    form.no_padding()
    if getattr(form.model, "dropout", None):
        form.model.dropout = None
        logger.info(f"{where}: its BPE dropout is switched off, so that the same text always has the same ids")
    _add(form, said, where=where)
    names = settle(said, form.get_vocab(with_added_tokens=True), where=where)
    form.add_special_tokens([AddedToken(n, special=True, normalized=False) for n in dict.fromkeys(names.values())])

    tokens = form.get_vocab(with_added_tokens=True)
    ids = {role: tokens[name] for role, name in names.items()}
    before = _before(form)
    if len(before) == 1:
        ids.setdefault("bos", before[0])
    adds = said.add_bos if said.add_bos is not None else "bos" in ids and before == [ids["bos"]]
    form.post_processor = None
    control = {t.content: i for i, t in form.get_added_tokens_decoder().items() if t.special}
    tokenizer = Tokenizer(
        engine=engine or Fast(form.to_str()),
        sheet=form.to_str(),
        control=dict(sorted(control.items(), key=lambda pair: pair[1])),
        eos_id=ids["eos"],
        bos_id=ids.get("bos"),
        adds_bos=bool(adds) and "bos" in ids,
        pad_id=ids.get("pad", ids["eos"]),
        pad_named="pad" in ids,
        vocab_size=max(tokens.values()) + 1,
        chat_template=said.chat_template,
    )
    _guard(tokenizer, unknown=getattr(form.model, "unk_token", None), where=where)
    return tokenizer


def _add(form: tokenizers.Tokenizer, said: Named, *, where: Path) -> None:
    """Tokens that only the files beside it know are in the form, with the ids these files give."""
    known = form.get_added_tokens_decoder()
    for i, (content, special) in sorted(said.added.items()):
        if i in known and known[i].content == content:
            continue
        token = AddedToken(content, special=special, normalized=False)
        form.add_special_tokens([token]) if special else form.add_tokens([token])
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


def _guard(tokenizer: Tokenizer, *, unknown: str | None, where: Path) -> None:
    """No control token is made out of its own name in a text; a tokenizer whose model would do so is refused."""
    ids = {i for name, i in tokenizer.control.items() if name != unknown}
    for name, row in zip(tokenizer.control, tokenizer.encode_batch(list(tokenizer.control))):
        if not ids.isdisjoint(row):
            raise InputError(
                f'{where}: the text "{name}" would become a control token, whatever is asked; such a tokenizer cannot'
                " be trusted with raw text"
            )
