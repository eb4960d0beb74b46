"""Files of one JSON object a line, plain or gzip."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from danlu.files.document import Document, Reject, unusable
from danlu.files.stream import BOM, LINE_LIMIT, Line, lines, undecodable

MISSING_AT_START = 100  # records in a row from the first one without the field: then it is the field that is wrong


def read(path: Path, *, text: str = "text", limit: int = LINE_LIMIT) -> Iterator[Document | Reject]:
    """The string under the field ``text`` of each record; blank lines are passed over, every other line gives one.

    Only that field is looked at: what the others hold, and of which type, does not matter. A key that stands twice
    counts as its last. Nothing of a bad line is used, and the lines after it are read.
    """
    file, seen, missing = str(path), 0, 0
    for line in lines(path, limit=limit):
        if isinstance(line, Reject):
            yield line
            continue
        if not line.content.strip():
            continue
        if not seen and line.content.lstrip().startswith(b"["):
            yield Reject(
                file, None, None, "this is a JSON array, not one object a line; write one a line (jq -c '.[]' does)"
            )
            return
        seen += 1
        value = _object(file, line)
        if isinstance(value, Reject):
            yield value
            continue
        if text not in value:
            missing += 1
            if missing == seen == MISSING_AT_START:
                reason = (
                    f"none of the first {missing} records has a field {text!r}; the last of them has {_names(value)}"
                )
                yield Reject(file, None, None, reason)
                return
            yield Reject(file, line.number, None, f"the record has no field {text!r}; its fields are {_names(value)}")
            continue
        found = value[text]
        if not isinstance(found, str):
            yield Reject(file, line.number, None, f"the field {text!r} is {_kind(found)}, not a string")
        elif reason := unusable(found):
            yield Reject(file, line.number, None, reason)
        else:
            yield Document(found, file, line.number)


def _object(file: str, line: Line) -> dict[str, Any] | Reject:
    content, offset = line.content, line.offset
    if content.startswith(BOM):  # files with a mark each, put one behind the other
        content, offset = content[len(BOM) :], offset + len(BOM)
    try:
        source = content.decode()
    except UnicodeDecodeError as error:
        return Reject(file, line.number, offset + error.start, undecodable(content, error))
    try:
        value = json.loads(source)
    except json.JSONDecodeError as error:
        return Reject(file, line.number, offset + len(source[: error.pos].encode()), f"not JSON ({error.msg})")
    except RecursionError:
        return Reject(file, line.number, None, "nested too deeply")
    except ValueError as error:  # a whole number of thousands of digits
        return Reject(file, line.number, None, f"not readable ({str(error).partition(';')[0]})")
    if not isinstance(value, dict):
        return Reject(file, line.number, None, f"the record is {_kind(value)}, not an object")
    return value


def _names(record: dict[str, Any]) -> str:
    """The record's fields, the first twenty, each cut short."""
    shown = [repr(name[:40]) for name in list(record)[:20]]
    return (", ".join(shown) + (", …" if len(record) > 20 else "")) or "none"


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
