"""Plain text: strict UTF-8 with the place of a bad byte, three ways to cut, long files in pieces."""

from __future__ import annotations

import gzip
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danlu.files.document import Document, Reject
from danlu.files.text import read
from tests.shared import shared


def put(folder: Path, content: bytes) -> Path:
    (folder / "f.txt").write_bytes(content)
    return folder / "f.txt"


def texts(path: Path, **how: object) -> list[str]:
    found = list(read(path, **how))  # type: ignore[arg-type]
    assert not [record for record in found if isinstance(record, Reject)]
    return [record.text for record in found if isinstance(record, Document)]


CONTENT = b"\xef\xbb\xbffirst\r\nstill first\r\n\r\n \r\nsecond\x0b\xc2\x85\xe2\x80\xa8 here\rand here\n\n\n\nthird"


def test_three_ways_to_cut(tmp_path: Path) -> None:
    path = put(tmp_path, CONTENT)
    second = "second\x0b\x85\u2028 here\rand here"
    assert texts(path) == [f"first\nstill first\n\n \n{second}\n\n\n\nthird"]
    assert texts(path, split="paragraph") == ["first\nstill first", second, "third"]
    assert texts(path, split="line") == ["first", "still first", second, "third"]
    assert [r.line for r in read(path, split="paragraph")] == [1, 5, 9]
    assert [r.line for r in read(path, split="line")] == [1, 2, 5, 9]


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf", b"\n \n\t\r\n", gzip.compress(b"")])
@pytest.mark.parametrize("split", ["document", "line", "paragraph"])
def test_no_text_no_documents(tmp_path: Path, content: bytes, split: str) -> None:
    assert texts(put(tmp_path, content), split=split) == []


@pytest.mark.parametrize("split", ["document", "line", "paragraph"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_bad_byte_has_its_place(tmp_path: Path, split: str, packed: bool) -> None:
    content = b"good\n\nfine\nbad \xe6\x28 byte\n\nlast\n"
    found = list(read(put(tmp_path, gzip.compress(content) if packed else content), split=split))  # type: ignore[arg-type]
    bad = [record for record in found if isinstance(record, Reject)]
    assert [(one.line, one.byte) for one in bad] == [(4, 15)]
    assert str(bad[0]).startswith(f"{tmp_path / 'f.txt'}, line 4, byte 15: not UTF-8 at e6 28 20 62 (invalid cont")
    kept = {"document": [], "line": ["good", "fine", "last"], "paragraph": ["good", "last"]}[split]
    assert [record.text for record in found if isinstance(record, Document)] == kept


def test_every_broken_line_of_a_real_file() -> None:
    """The file says of itself: lines 1 and 6 are good, 2 to 5 are bad."""
    found = list(read(shared("dirty/encodings/invalid_utf8.txt"), split="line"))
    assert [r.line for r in found if isinstance(r, Document)] == [1, 6]
    assert [r.line for r in found if isinstance(r, Reject)] == [2, 3, 4, 5]


@pytest.mark.parametrize("name", ["zh_gbk", "zh_big5", "zh_gb18030", "euro_latin1", "euro_cp1252", "mixed_lines"])
def test_other_encodings_are_refused_at_their_first_bad_byte(name: str) -> None:
    path = shared(f"dirty/encodings/{name}.txt")
    content = path.read_bytes()
    with pytest.raises(UnicodeDecodeError) as error:
        content.decode()
    (bad,) = read(path)
    assert isinstance(bad, Reject) and bad.byte == error.value.start
    assert bad.line == content[: error.value.start].count(b"\n") + 1


@pytest.mark.parametrize("name", ["utf8_bom", "plain_utf8_zh"])
def test_utf8_is_read_unchanged(name: str) -> None:
    assert texts(shared(f"dirty/encodings/{name}.txt")) == [
        shared(f"dirty/encodings/expected/{name}.txt.utf8").read_bytes().decode()
    ]


@pytest.mark.parametrize(("name", "told"), [("utf16le_bom", "UTF-16 (little-endian)"), ("utf16be_nobom", "NUL")])
@pytest.mark.parametrize("split", ["document", "line", "paragraph"])
def test_utf16_is_refused(name: str, told: str, split: str) -> None:
    found = list(read(shared(f"dirty/encodings/{name}.txt"), split=split))  # type: ignore[arg-type]
    assert found and all(isinstance(record, Reject) and told in record.reason for record in found)


def test_old_mac_file() -> None:
    path = shared("dirty/broken/cr_only.txt")
    assert texts(path, split="line") == ["first line", "second line", "third line"]
    assert texts(path) == ["first line\nsecond line\nthird line\n"]


def test_a_carriage_return_inside_stays(tmp_path: Path) -> None:
    assert texts(put(tmp_path, b"a\rb")) == ["a\rb"]
    assert texts(put(tmp_path, b"a\rb\nc\r"), split="line") == ["a\rb", "c"]


WORDS = st.text(st.sampled_from("ab 明\n\r\u2028é😀"), max_size=60)


@settings(deadline=None)
@given(WORDS, st.integers(5, 40), st.booleans())
def test_a_long_file_comes_in_pieces_that_join_to_it(
    tmp_path_factory: pytest.TempPathFactory, text: str, segment: int, packed: bool
) -> None:
    text = "x\n" + text + "x\r\ny"
    content = text.encode()
    path = put(tmp_path_factory.mktemp("text"), gzip.compress(content) if packed else content)
    found = [record for record in read(path, segment=segment) if isinstance(record, Document)]
    assert "".join(record.text for record in found) == text.replace("\r\n", "\n")
    assert [record.goes_on for record in found] == [True] * (len(found) - 1) + [False]
    assert len(found) > 1 or len(content) <= 2 * segment


def test_pieces_end_behind_words(tmp_path: Path) -> None:
    text = "some words\nand\n\n  more of them\nand an end\n" * 50
    pieces = [r.text for r in read(put(tmp_path, text.encode()), segment=256) if isinstance(r, Document)]
    assert len(pieces) > 5 and "".join(pieces) == text
    assert all(one[-1].isalnum() and other[0] == "\n" for one, other in pairwise(pieces))


@settings(deadline=None)
@given(st.integers(0, 400), st.sampled_from([b"\xff", b"\xe6\x28", b"\x00", b"\xf0\x9f\x98"]))
def test_a_long_file_with_a_bad_byte_gives_nothing_but_its_place(
    tmp_path_factory: pytest.TempPathFactory, at: int, bad: bytes
) -> None:
    content = b"line of words\n" * 30
    content = content[:at] + bad + content[at:]
    (found,) = read(put(tmp_path_factory.mktemp("text"), content), segment=64)
    assert isinstance(found, Reject)
    assert (found.byte, found.line) == (at, content[:at].count(b"\n") + 1)


@pytest.mark.parametrize("split", ["document", "line", "paragraph"])
def test_a_packed_file_cut_short(tmp_path: Path, split: str) -> None:
    packed = gzip.compress(b"".join(b"%d %d\n\n" % (number, number**9) for number in range(2000)))
    *kept, bad = read(put(tmp_path, packed[: len(packed) // 2]), split=split)  # type: ignore[arg-type]
    assert isinstance(bad, Reject) and "cut short" in bad.reason
    assert [r.text for r in kept if isinstance(r, Document)] == [f"{n} {n**9}" for n in range(len(kept))]
    assert bool(kept) == (split != "document")


def test_a_paragraph_has_a_limit(tmp_path: Path) -> None:
    path = put(tmp_path, b"short\n\n" + b"long one\n" * 30 + b"\nshort\n")
    one, bad, other = read(path, split="paragraph", limit=100)
    assert isinstance(one, Document) and isinstance(other, Document)
    assert isinstance(bad, Reject) and bad.line == 3 and "LINE_LIMIT" in bad.reason
