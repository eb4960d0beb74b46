"""The bytes of a raw file, as they are or line by line; gzip is known by its first bytes, not by the name."""

from __future__ import annotations

import gzip
import io
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from danlu.core.errors import InputError
from danlu.files.document import Reject

if TYPE_CHECKING:
    from typing_extensions import Buffer

LINE_LIMIT = 64 << 20  # bytes of one line: what has no newline for so long is not a file of lines
GZIP = b"\x1f\x8b"
DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error)
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Line:
    """One line as bytes, without its newline; its number from 1, and its offset in the (unpacked) file."""

    content: bytes
    number: int
    offset: int


def readable(path: Path) -> os.stat_result:
    """The path is a file that can be opened, else InputError says in one sentence what it is instead."""
    try:
        facts = path.stat()
        if stat.S_ISDIR(facts.st_mode):
            raise InputError(f"{path} is a folder; a file is needed here.")
        if not stat.S_ISREG(facts.st_mode):
            raise InputError(f"{path} is not a plain file (a pipe, a socket or a device); copy its content to a file.")
        with open(path, "rb"):
            pass
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist (looked in {Path.cwd()}); check the path.") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    return facts


@contextmanager
def open_bytes(path: Path, *, old_mac: bool = False) -> Iterator[BinaryIO]:
    """The file's content as a stream of bytes, unpacked if it starts as gzip does. Reading on may raise ``DAMAGE``.

    ``old_mac``: each carriage return is handed on as a newline.
    """
    readable(path)
    with ExitStack() as stack:
        file = stack.enter_context(open(path, "rb"))
        stream: BinaryIO = file
        if file.peek(2)[:2] == GZIP:
            packed = stack.enter_context(gzip.GzipFile(fileobj=file))
            stream = stack.enter_context(io.BufferedReader(_Source(packed), 1 << 18))
        if old_mac:
            stream = stack.enter_context(io.BufferedReader(_Source(stream, newline=b"\r"), 1 << 18))
        yield stream


class _Source(io.RawIOBase):
    """A stream that hands on what there is, at once: all that precedes a damage is read before the damage is met.

    The byte that ends a line in it is handed on as a newline.
    """

    def __init__(self, stream: BinaryIO | gzip.GzipFile, *, newline: bytes = b"\n") -> None:
        self._stream = cast(io.BufferedReader, stream)
        self._newline = newline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        view = memoryview(buffer)
        content = self._stream.read1(len(view))
        view[: len(content)] = content if self._newline == b"\n" else content.replace(self._newline, b"\n")
        return len(content)


def damage(error: Exception) -> str:
    """What is wrong with a packed file, in words."""
    if isinstance(error, EOFError):
        return "the gzip data is cut short"
    if "CRC" in str(error):
        return "the gzip data is damaged: its checksum does not fit"
    if "length" in str(error):
        return "the gzip data is damaged: its length does not fit"
    return f"the gzip data is damaged ({error})"


def lines(path: Path, *, limit: int = LINE_LIMIT, old_mac: bool = False) -> Iterator[Line | Reject]:
    """The lines of a file, cut at newlines and nowhere else; a byte-order mark at the start is left out.

    A line longer than ``limit`` is a Reject, and the next line follows. Damaged gzip is a Reject, and the last.
    """
    number = offset = 0
    with open_bytes(path, old_mac=old_mac) as file:
        try:
            while content := file.readline(limit):
                number += 1
                start, offset = offset, offset + len(content)
                if len(content) == limit and not content.endswith(b"\n") and (next_one := file.read(1)):
                    yield Reject(str(path), number, start, f"the line is longer than {limit:,} bytes (LINE_LIMIT)")
                    offset += 1 if next_one == b"\n" else 1 + _pass_over(file)
                    continue
                if number == 1 and content.startswith(BOM):
                    content, start = content[len(BOM) :], len(BOM)
                yield Line(content.removesuffix(b"\n"), number, start)
        except DAMAGE as error:
            yield Reject(str(path), number + 1, None, f"{damage(error)} after {number} whole lines")
        except OSError as error:
            raise InputError(f"{path} cannot be read on after line {number}: {error.strerror or error}.") from error


def _pass_over(file: BinaryIO) -> int:
    """The rest of the line is read and thrown away; how many bytes that was."""
    passed = 0
    while rest := file.readline(1 << 20):
        passed += len(rest)
        if rest.endswith(b"\n"):
            break
    return passed


def undecodable(content: bytes, error: UnicodeDecodeError) -> str:
    """What is wrong with bytes that are not UTF-8, in words."""
    shown = content[error.start : error.start + 4].hex(" ")
    return f"not UTF-8 at {shown} ({error.reason}); convert the file, for example with iconv -t utf-8"
