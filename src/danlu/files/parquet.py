"""One column of text of a Parquet file, read in batches of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from danlu.files.document import Document, Reject, unusable
from danlu.files.stream import readable

BATCH = 8 << 20  # bytes of text asked for at once, by the file's own account of its column
ROWS = 4096


def read(path: Path, *, text: str = "text") -> Iterator[Document | Reject]:
    """The strings of the column ``text``, a document a row; no other column is read.

    A file that is not Parquet, or lacks the column, or holds something else in it, is one Reject.
    """
    readable(path)
    file, rows = str(path), 0
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as table:
            fault = _column_fault(table, text)
            if fault:
                yield Reject(file, None, None, fault)
                return
            for batch in table.iter_batches(batch_size=_batch_rows(table, text), columns=[text]):
                for value in batch.column(0):
                    rows += 1
                    yield _row(file, rows, text, value)
    except (pa.ArrowException, OSError) as error:
        after = f" after {rows} rows" if rows else ""
        yield Reject(file, None, None, f"not a whole Parquet file{after} ({str(error).strip().splitlines()[0][:200]})")


def _row(file: str, row: int, text: str, value: pa.Scalar) -> Document | Reject:
    try:
        found = value.as_py()
    except UnicodeDecodeError as error:
        return Reject(file, row, None, f"the column {text!r} is not UTF-8 ({error.reason})")
    if found is None:
        return Reject(file, row, None, f"the column {text!r} is null")
    if reason := unusable(found):
        return Reject(file, row, None, reason)
    return Document(found, file, row)


def _column_fault(table: pq.ParquetFile, text: str) -> str:
    schema = table.schema_arrow
    if text not in schema.names:
        shown = ", ".join(repr(name[:40]) for name in schema.names[:20]) + (", …" if len(schema.names) > 20 else "")
        return f"there is no column {text!r}; the columns are {shown or 'none'}"
    if schema.names.count(text) > 1:
        return f"the column {text!r} is there {schema.names.count(text)} times"
    kind = schema.field(text).type
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(plain) or pa.types.is_large_string(plain)):
        return f"the column {text!r} holds {kind}, not strings"
    return ""


def _batch_rows(table: pq.ParquetFile, text: str) -> int:
    """Rows that hold about ``BATCH`` bytes of text in the row group whose rows are longest."""
    rows = ROWS
    for number in range(table.metadata.num_row_groups):
        group = table.metadata.row_group(number)
        for place in range(group.num_columns):
            column = group.column(place)
            if column.path_in_schema == text and group.num_rows:
                mean = column.total_uncompressed_size / group.num_rows
                rows = min(rows, max(1, int(BATCH / max(mean, 1.0))))
    return rows
