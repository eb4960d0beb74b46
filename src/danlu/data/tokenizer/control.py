"""Which control tokens end, begin and pad: read from the files that Hugging Face keeps beside a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from danlu.core.errors import InputError

# The names looked for, in this order, where no file says which token ends, begins or pads.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eos|>", "<end_of_text>")
BEGINS = ("<|begin_of_text|>", "<s>", "<bos>", "[BOS]", "<|bos|>")
PADS = ("<|padding|>", "<pad>", "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>")


@dataclass(frozen=True, kw_only=True)
class Named:
    """What the files beside a tokenizer say of its control tokens; None where they say nothing.

    added   further tokens by id: (content, whether it is a control token)
    ids     end, begin and padding by id, from the model's config.json, for where the names are not given
    """

    eos: str | None = None
    bos: str | None = None
    pad: str | None = None
    add_bos: bool | None = None
    added: dict[int, tuple[str, bool]]
    ids: dict[str, int]
    chat_template: str | None = None


def named(folder: Path) -> Named:
    """What the folder's tokenizer_config.json, special_tokens_map.json, added_tokens.json and config.json say."""
    settings = read(folder / "tokenizer_config.json")
    special = read(folder / "special_tokens_map.json")
    names = {role: _content(settings.get(f"{role}_token") or special.get(f"{role}_token")) for role in _ROLES}
    added = {int(i): (content, True) for content, i in read(folder / "added_tokens.json").items()}
    for i, token in settings.get("added_tokens_decoder", {}).items():
        added[int(i)] = (token["content"], bool(token.get("special", False)))
    ids: dict[str, int] = {}
    for file in ("config.json", "generation_config.json"):
        for role in _ROLES:
            value = read(folder / file).get(f"{role}_token_id")
            first = value[0] if isinstance(value, list) and value else value
            if isinstance(first, int) and first >= 0:
                ids.setdefault(role, first)
    template = folder / "chat_template.jinja"
    chat = template.read_text(encoding="utf-8") if template.exists() else settings.get("chat_template")
    return Named(
        eos=names["eos"],
        bos=names["bos"],
        pad=names["pad"],
        add_bos=settings.get("add_bos_token"),
        added=added,
        ids=ids,
        chat_template=chat if isinstance(chat, str) else None,
    )


_ROLES = ("eos", "bos", "pad")


def settle(said: Named, tokens: Mapping[str, int], control: Collection[str], *, where: Path) -> dict[str, str]:
    """The names of the end, begin and padding tokens, those that exist; a tokenizer without an end is refused.

    tokens holds the id of every token by its name; control the names of those that are control tokens already. A name
    the files give must be among the tokens. Usual names are looked for among the control tokens only, since a large
    vocabulary may hold "<s>" as ordinary text; GPT-2's own file alone marks none, so its end is taken from all.
    """
    by_id = {i: name for name, i in tokens.items()}
    found: dict[str, str] = {}
    usual = {"eos": ENDS, "bos": BEGINS, "pad": PADS}
    for role in _ROLES:
        name = getattr(said, role)
        if name is not None and name not in tokens:
            raise InputError(
                f'{where}: {role}_token is "{name}", which is not among the tokens; name one that is, in'
                " tokenizer_config.json"
            )
        name = name or by_id.get(said.ids.get(role, -1)) or next((n for n in usual[role] if n in control), None)
        if name is not None:
            found[role] = name
    if "eos" not in found and ENDS[0] in tokens:
        found["eos"] = ENDS[0]
    if "eos" not in found:
        raise InputError(
            f"{where}: no token is named as the one that ends a document, and none of {', '.join(ENDS)} is there;"
            ' write {"eos_token": "…"} into tokenizer_config.json beside it'
        )
    return found


def read(path: Path) -> dict[str, Any]:
    """The JSON object a file holds; empty where there is no such file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not JSON ({error}); fetch it again or remove it") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: a JSON object is expected, not a {type(value).__name__}")
    return value


def _content(token: Any) -> str | None:
    """The name of a token that is written as a string or as Hugging Face's object with a content."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None
