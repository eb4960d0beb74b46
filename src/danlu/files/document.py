"""What a raw file gives: documents, and rejects where a record is bad."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Document:
    """One text, and where it came from.

    line     the line (of a .parquet: the row) at which it starts, from 1
    goes_on  whether this is not all of it: the next one from the same file goes on where this ends
    """

    text: str
    file: str
    line: int
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class Reject:
    """One record that cannot be used, or a file that cannot be read on.

    line  the line or row, from 1; None where it is the file as a whole
    byte  offset of the first bad byte in the (unpacked) file, from 0; None where no one byte is to blame
    """

    file: str
    line: int | None
    byte: int | None
    reason: str

    def __str__(self) -> str:
        line = f", line {self.line}" if self.line is not None else ""
        byte = f", byte {self.byte}" if self.byte is not None else ""
        return f"{self.file}{line}{byte}: {self.reason}"


def unusable(text: str) -> str:
    """Why this text cannot be learned from as it is: a NUL, or half a surrogate pair; empty if it can."""
    if "\0" in text:
        return "the text holds a NUL character"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"the text holds half a surrogate pair (U+{ord(text[error.start]):04X}), which is no character"
    return ""
