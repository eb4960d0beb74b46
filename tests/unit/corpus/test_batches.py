"""Documents in batches: nothing lost, nothing doubled, one end token each, whatever the length."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from danlu.corpus import batches
from danlu.corpus.batches import Piece, encode, gather
from danlu.data.tokenizer import load
from danlu.files.document import Document, Reject
from tests.shared import shared
from tests.unit.corpus.encoder import Told


def documents(texts: list[str], *, begin: list[int]) -> list[list[int]]:
    """What comes out of batches, document by document."""
    flat: list[int] = []
    ends: list[int] = []
    for batch in gather(Document(text, "f", 1) for text in texts):
        ids, at = encode(Told(begin=begin), batch.pieces)
        ends += [len(flat) + int(end) for end in at]
        flat += ids.tolist()
    assert not flat or ends[-1] == len(flat)
    return [flat[start:end] for start, end in zip([0, *ends], ends)]


@settings(deadline=None)
@given(st.lists(st.text("ab \n明", max_size=80), max_size=10), st.sampled_from([[], [257]]))
def test_each_document_once_with_one_end(texts: list[str], begin: list[int]) -> None:
    expected = [[*begin, *text.encode(), 256] for text in texts if text.strip()]
    with pytest.MonkeyPatch.context() as patch:
        for whole, size, records in ((10**6, 10**6, 10**6), (20, 7, 10**6), (20, 7, 3)):
            patch.setattr(batches, "WHOLE", whole)
            patch.setattr(batches, "SIZE", size)
            patch.setattr(batches, "RECORDS", records)
            assert documents(texts, begin=begin) == expected


def test_a_document_that_goes_on_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "SIZE", 4)
    parts = [Document("some text", "f", 1, goes_on=True), Document("  ", "f", 1, goes_on=True), Document("", "f", 1)]
    found = [piece for batch in gather([*parts, Document("x", "f", 2)]) for piece in batch.pieces]
    assert "".join(piece.text for piece in found) == "some text  x"
    assert [piece.starts for piece in found].count(True) == [piece.ends for piece in found].count(True) == 2
    flat, ends = encode(Told(), [Piece("ab", starts=True, ends=False), Piece("", starts=False, ends=True)])
    assert (flat.tolist(), ends.tolist()) == ([97, 98, 256], [3])
    assert found[0].starts and found[-2].ends and found[-1].starts and found[-1].ends


def test_what_is_left_out_is_counted() -> None:
    bad = Reject("f", 2, None, "bad")
    found = list(gather([Document("", "f", 1), bad, Document(" \n", "f", 3), Document("x", "f", 4)]))
    assert [(batch.empty, batch.rejects, len(batch.pieces), batch.last) for batch in found] == [(2, [bad], 1, True)]
    assert [batch.last for batch in gather([])] == [True]


def test_batches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "SIZE", 100)
    monkeypatch.setattr(batches, "WHOLE", 1000)
    monkeypatch.setattr(batches, "RECORDS", 7)
    for text, most in (("x", 7), ("x" * 30, 120), ("word " * 1000, 300)):
        found = list(gather(Document(text, "f", n) for n in range(50)))
        assert len(found) > 5
        assert all(len(batch.pieces) <= 7 and batch.characters <= most for batch in found)


def test_cutting_a_long_text_changes_no_id_of_a_byte_level_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against GPT-2's tokenizer run by Hugging Face's library on the whole text."""
    folder = shared("tokenizers/gpt2/vocab.json").parent
    reference = Tokenizer(BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    reference.pre_tokenizer = ByteLevel(add_prefix_space=False)
    text = shared("pretrain/tinyshakespeare.txt").read_text()[:100_000]
    text += "  two  blanks\n\n\nand 3 lines,\n \nwell" * 100 + "\n\n\n\nab" * 2000
    monkeypatch.setattr(batches, "WHOLE", 1000)
    monkeypatch.setattr(batches, "SIZE", 307)  # no multiple of what is repeated above
    tokenizer = load(str(folder))
    found: list[int] = []
    pieces = 0
    for batch in gather([Document(text, "f", 1)]):
        pieces += len(batch.pieces)
        found += encode(tokenizer, batch.pieces)[0].tolist()
    assert pieces > 200
    assert found == [*reference.encode(text).ids, 50256]
