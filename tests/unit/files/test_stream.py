"""Bytes of raw files: gzip by its bytes, lines at newlines only, limits, damage with its place."""

from __future__ import annotations

import gzip
import os
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danlu.core.errors import InputError
from danlu.files.document import Reject
from danlu.files.stream import Line, lines, open_bytes, readable


def put(folder: Path, content: bytes, name: str = "f.txt") -> Path:
    (folder / name).write_bytes(content)
    return folder / name


@settings(deadline=None)
@given(st.lists(st.binary(max_size=30), max_size=8), st.booleans())
def test_lines_are_what_split_gives(tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], packed: bool) -> None:
    content = b"x" + b"\n".join(parts)  # begins with no magic bytes
    path = put(tmp_path_factory.mktemp("lines"), gzip.compress(content) if packed else content)
    found = list(lines(path))
    expected = content.split(b"\n")
    assert [line.content for line in found if isinstance(line, Line)] == (expected if expected[-1] else expected[:-1])
    assert all(content[line.offset :].startswith(line.content) for line in found if isinstance(line, Line))
    assert [line.number for line in found if isinstance(line, Line)] == list(range(1, len(found) + 1))


def test_only_a_newline_ends_a_line(tmp_path: Path) -> None:
    content = "a\u2028b\u0085c\x0bd\x0ce\x1cf\rg\u2029h\nsecond".encode()
    assert [line.content for line in lines(put(tmp_path, content)) if isinstance(line, Line)] == content.split(b"\n")


def test_the_mark_at_the_start_is_left_out(tmp_path: Path) -> None:
    assert list(lines(put(tmp_path, b"\xef\xbb\xbfa\nb"))) == [Line(b"a", 1, 3), Line(b"b", 2, 5)]


@pytest.mark.parametrize("packed", [False, True])
def test_a_long_line_is_passed_over_and_named(tmp_path: Path, packed: bool) -> None:
    content = b"one\n" + b"x" * 3_000_000 + b"\n" + b"three\n" + b"y" * 11
    path = put(tmp_path, gzip.compress(content) if packed else content)
    one, bad, three, last = lines(path, limit=10)
    assert one == Line(b"one", 1, 0) and three == Line(b"three", 3, 3_000_005)
    assert (
        isinstance(bad, Reject) and (bad.line, bad.byte) == (2, 4) and "longer than 10 bytes (LINE_LIMIT)" in str(bad)
    )
    assert isinstance(last, Reject) and last.line == 4


@pytest.mark.parametrize("content", [b"x" * 10, b"x" * 9 + b"\n", b"\n" * 10])
def test_a_line_of_just_the_limit_is_read(tmp_path: Path, content: bytes) -> None:
    assert all(isinstance(line, Line) for line in lines(put(tmp_path, content), limit=10))


def test_a_line_of_one_byte_more_is_not(tmp_path: Path) -> None:
    bad, after = lines(put(tmp_path, b"x" * 10 + b"\nnext\n"), limit=10)
    assert isinstance(bad, Reject) and (bad.line, bad.byte) == (1, 0) and after == Line(b"next", 2, 11)


def test_gzip_of_many_members(tmp_path: Path) -> None:
    path = put(tmp_path, gzip.compress(b"a\nb") + gzip.compress(b"") + gzip.compress(b"c\nd\n") + b"\0" * 20)
    assert [line.content for line in lines(path) if isinstance(line, Line)] == [b"a", b"bc", b"d"]


def test_every_cut_of_a_gzip_is_noticed(tmp_path: Path) -> None:
    """At each length: the whole lines that zlib itself can still unpack, and then a word about the damage."""
    packed = gzip.compress(b"".join(b"%d %d\n" % (number, number**7) for number in range(100)), mtime=0)
    for length in range(2, len(packed), 7):
        found = list(lines(put(tmp_path, packed[:length])))
        held = zlib.decompressobj(wbits=31).decompress(packed[:length])
        assert [line.content for line in found if isinstance(line, Line)] == held.split(b"\n")[:-1]
        bad = found[-1]
        assert (
            isinstance(bad, Reject)
            and "cut short" in bad.reason
            and f"after {len(found) - 1} whole lines" in bad.reason
        )


def test_damage_inside_a_gzip_is_noticed(tmp_path: Path) -> None:
    packed = gzip.compress(os.urandom(3000).hex().encode(), mtime=0)
    for offset in [2, *range(10, len(packed), 97), len(packed) - 6, len(packed) - 2]:
        changed = bytearray(packed)
        changed[offset] ^= 0x80
        found = list(lines(put(tmp_path, bytes(changed))))
        assert isinstance(found[-1], Reject) and "gzip data is" in found[-1].reason, offset
    found = list(lines(put(tmp_path, packed + b"rubbish")))
    assert isinstance(found[-1], Reject)


def test_old_carriage_returns_may_be_line_ends(tmp_path: Path) -> None:
    for content in (b"a\rb\r", gzip.compress(b"a\rb\r")):
        found = list(lines(put(tmp_path, content), old_mac=True))
        assert found == [Line(b"a", 1, 0), Line(b"b", 2, 2)]


def test_what_cannot_be_opened_is_told_in_a_sentence(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "loose.txt").symlink_to(tmp_path / "nowhere.txt")
    for name, reason in (
        ("no.txt", "does not exist"),
        ("loose.txt", "does not exist"),
        (".", "is a folder"),
        ("pipe.txt", "not a plain file"),
        ("x" * 300, "cannot be read: File name too long"),
    ):
        with pytest.raises(InputError, match=reason):
            readable(tmp_path / name)


def test_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path, b"a")
    monkeypatch.setattr(
        "builtins.open", lambda *_, **__: (_ for _ in ()).throw(PermissionError(13, "Permission denied"))
    )
    with pytest.raises(InputError, match=r"f\.txt cannot be read: Permission denied"), open_bytes(path):
        pass
