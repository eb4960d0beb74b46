"""Pieces of text, as they come, make up the whole, and none holds half a character."""

from __future__ import annotations

import random

import pytest

from danlu.data import tokenizer as tokenizers
from danlu.generate.text import Text
from tests.shared import shared

WORDS = "Hello, furnace! 丹炉里炼金，火候到了。  🙂👩‍👩‍👧 naïve\n\tĐặng — 𝔘nicode ﷽ end"
KINDS = ["byte", "gpt2", "llama_hf", "mistral_v1", "tiny_bpe"]


def tokenizer(kind: str) -> tokenizers.Tokenizer:
    return tokenizers.load(kind if kind == "byte" else shared(f"tokenizers/{kind}"))


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_make_up_the_whole(kind: str) -> None:
    """Every cut of a text in prompt and continuation: the pieces are the whole less the prompt, and hold no U+FFFD."""
    it = tokenizer(kind)
    ids = it.encode(WORDS)
    whole = it.decode(ids)
    assert "�" not in whole
    for cut in range(0, len(ids), 3):
        text = Text(it.decode, before=ids[:cut])
        pieces = [text.add(token) for token in ids[cut:]]
        assert all("�" not in piece for piece in pieces)
        assert text.finish() == ""
        prompt = it.decode(ids[:cut]).rstrip("�")
        assert prompt + "".join(pieces) == whole
        assert sum(map(bool, pieces)) > 10 or cut > 0  # it does stream


def test_a_character_comes_with_its_last_byte() -> None:
    it = tokenizers.load("byte")
    text = Text(it.decode)
    assert [text.add(byte) for byte in "é中🙂".encode()] == ["", "é", "", "", "中", "", "", "", "🙂"]


def test_bytes_that_are_no_character_show_and_hold_nothing_back() -> None:
    it = tokenizers.load("byte")
    text = Text(it.decode)
    assert "".join(text.add(byte) for byte in b"a\xffb\xe4\xb8c") == "a�b�c"
    assert text.add(0xE4) == ""
    assert text.finish() == "�"


def test_many_broken_bytes_are_not_waited_for() -> None:
    text = Text(tokenizers.load("byte").decode)
    given = "".join(text.add(0x80) for _ in range(100))
    assert len(given) > 85
    assert given + text.finish() == "�" * 100


def test_control_tokens_have_no_text() -> None:
    it = tokenizers.load("byte")
    text = Text(it.decode, hidden=set(it.control.values()))
    assert [text.add(token) for token in (97, it.eos_id, 98, it.pad_id)] == ["a", "", "b", ""]


@pytest.mark.parametrize("kind", ["byte", "gpt2", "tiny_bpe"])
def test_any_ids_at_all(kind: str) -> None:
    """Ids at random are mostly no text; what is given, piece by piece, is still what decoding them all gives."""
    it = tokenizer(kind)
    draw = random.Random(7)
    usable = sorted(set(range(it.vocab_size)) - set(it.control.values()))
    for _ in range(50):
        ids = draw.choices(usable[:400], k=40)
        text = Text(it.decode)
        pieces = [text.add(token) for token in ids]
        assert "".join(pieces) + text.finish() == it.decode(ids)
