"""Plain text files: strict UTF-8, cut into one document, paragraphs or lines.

A byte-order mark at the start is left out and CRLF becomes a newline; nothing else is changed. Only a newline ends a
line, no other character that some rule calls a line end. One old convention is honoured: a file that holds no newline,
but carriage returns, the last of them at its end, has carriage returns for line ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Literal

from danlu.core.errors import InputError
from danlu.files.document import Document, Reject
from danlu.files.stream import BOM, DAMAGE, LINE_LIMIT, Line, damage, lines, open_bytes, undecodable

Split = Literal["document", "line", "paragraph"]
SEGMENT = 16 << 20  # bytes of a document held at once; a longer one is handed on in several
HEAD = 1 << 16  # bytes looked at to learn how lines end
WIDE = {b"\xff\xfe": "UTF-16 (little-endian)", b"\xfe\xff": "UTF-16 (big-endian)"}


def read(
    path: Path, *, split: Split = "document", limit: int = LINE_LIMIT, segment: int = SEGMENT
) -> Iterator[Document | Reject]:
    """The documents of a text file: all of it, or each paragraph (blank lines between them), or each line.

    Where one byte is not UTF-8, the record that holds it is rejected: the line, the paragraph, or the whole file. A
    whole file of more than ``segment`` bytes comes in pieces that go on, once all of it was found to be sound. Blank
    lines, and a file of nothing else, give nothing.
    """
    try:
        with open_bytes(path) as stream:
            head = stream.read(HEAD)
    except DAMAGE:
        head = b""  # the reader below tells of it, and how far it came
    if head[:2] in WIDE:
        reason = f"the file is {WIDE[head[:2]]}, not UTF-8; convert it, for example with iconv -f utf-16 -t utf-8"
        yield Reject(str(path), None, 0, reason)
        return
    old_mac = b"\n" not in head and head.endswith(b"\r") and len(head) < HEAD
    if split == "document":
        yield from _whole(path, old_mac=old_mac, segment=segment)
    elif split == "line":
        for line in lines(path, limit=limit, old_mac=old_mac):
            text = _decode(path, line) if isinstance(line, Line) else line
            if isinstance(text, Document):
                if text.text.strip():
                    yield text
            else:
                yield text
    else:
        yield from _paragraphs(path, old_mac=old_mac, limit=limit)


def _decode(path: Path, line: Line) -> Document | Reject:
    content = line.content.removesuffix(b"\r")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        return Reject(str(path), line.number, line.offset + error.start, undecodable(content, error))
    if "\0" in text:
        return Reject(str(path), line.number, line.offset + content.index(b"\0"), "the text holds a NUL character")
    return Document(text, str(path), line.number)


def _paragraphs(path: Path, *, old_mac: bool, limit: int) -> Iterator[Document | Reject]:
    kept: list[str] = []
    first, size = 0, 0
    bad: Reject | None = None
    damaged: Reject | None = None
    for line in lines(path, limit=limit, old_mac=old_mac):
        if isinstance(line, Reject) and line.byte is None:  # not a bad line but the end of what can be read
            damaged = line
            break
        text = _decode(path, line) if isinstance(line, Line) else line
        if isinstance(text, Reject):
            bad = bad or text
        elif text.text.strip():
            first = first or text.line
            size += len(line.content) + 1 if isinstance(line, Line) else 0
            if size <= limit:
                kept.append(text.text)
            elif bad is None:
                bad = Reject(str(path), first, None, f"the paragraph is longer than {limit:,} bytes (LINE_LIMIT)")
        elif kept or bad:
            yield bad or Document("\n".join(kept), str(path), first)
            kept, first, size, bad = [], 0, 0, None
    if damaged:
        yield damaged  # the paragraph that was being read is part of the damage
    elif kept or bad:
        yield bad or Document("\n".join(kept), str(path), first)


def _whole(path: Path, *, old_mac: bool, segment: int) -> Iterator[Document | Reject]:
    parts = _segments(path, old_mac=old_mac, segment=segment)
    start = list(islice(parts, 2))
    for part in chain(start, parts):  # to the end of the file, before any of it is handed on
        if isinstance(part, Reject):
            yield part
            return
    long = len(start) == 2
    held = ""
    for part in _segments(path, old_mac=old_mac, segment=segment) if long else start:
        if isinstance(part, Reject):
            raise InputError(f"{path} changed while it was read; run it again when nothing writes to it.")
        if held:
            yield Document(held, str(path), 1, goes_on=True)
        held = part
    if long or held.strip():
        yield Document(held, str(path), 1)


def _segments(path: Path, *, old_mac: bool, segment: int) -> Iterator[str | Reject]:
    """The text in stretches of about ``segment`` bytes, each cut after the last word that ends a line."""
    offset, line, held = 0, 1, b""
    with open_bytes(path, old_mac=old_mac) as stream:
        more = True
        while more:
            try:
                block = stream.read(segment)
            except DAMAGE as error:
                yield Reject(str(path), None, None, f"{damage(error)} after {offset + len(held):,} bytes")
                return
            except OSError as error:
                raise InputError(f"{path} cannot be read on after {offset:,} bytes: {error.strerror}.") from error
            more = len(block) == segment
            if offset == 0 and not held and block.startswith(BOM):
                block, offset = block[len(BOM) :], len(BOM)
            content = held + block
            stop = _stop(content) if more else len(content)
            content, held = content[:stop], content[stop:]
            try:
                text = content.decode()
            except UnicodeDecodeError as error:
                number = line + content.count(b"\n", 0, error.start)
                yield Reject(str(path), number, offset + error.start, undecodable(content, error))
                return
            if (nul := content.find(b"\0")) >= 0:
                number = line + content.count(b"\n", 0, nul)
                yield Reject(str(path), number, offset + nul, "the text holds a NUL character; is it UTF-8?")
                return
            offset, line = offset + len(content), line + content.count(b"\n")
            if text:
                yield text.replace("\r\n", "\n")


def _stop(content: bytes) -> int:
    """Where to cut: after the last word that ends a line; without one, between two characters."""
    stop = len(content[: content.rfind(b"\n") + 1].rstrip())
    if stop:
        return stop
    stop = len(content)
    while stop > 1 and content[stop - 1] & 0xC0 == 0x80:  # inside a character
        stop -= 1
    stop -= content[stop - 1] >= 0xC0  # its first byte goes with it
    return stop - (content[stop - 1 : stop] == b"\r") or len(content)
