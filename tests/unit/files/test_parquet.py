"""One column of Parquet files, against pyarrow's own writer and reader."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from danlu.files import parquet
from danlu.files.document import Document, Reject
from danlu.files.parquet import read
from tests.shared import shared


def put(folder: Path, table: pa.Table, **how: object) -> Path:
    pq.write_table(table, folder / "f.parquet", **how)
    return folder / "f.parquet"


def test_a_real_file() -> None:
    path = shared("pretrain/c4_small_train.parquet")
    expected = pq.read_table(path).column("text").to_pylist()
    found = list(read(path))
    assert [record.text for record in found if isinstance(record, Document)] == expected and len(expected) > 50
    assert [record.line for record in found] == list(range(1, len(expected) + 1))


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_kinds_of_string_column(tmp_path: Path, kind: pa.DataType) -> None:
    texts = ["a", "明月", "a"] * 50
    column = pa.array(texts).dictionary_encode() if pa.types.is_dictionary(kind) else pa.array(texts, kind)
    path = put(tmp_path, pa.table({"x": range(150), "text": column}), row_group_size=40)
    assert [record.text for record in read(path) if isinstance(record, Document)] == texts


def test_bad_rows_are_named(tmp_path: Path) -> None:
    broken = pa.array([b"good", b"bad \xe6\x28", None, b"n\0l", b""]).cast(pa.binary()).view(pa.string())
    found = list(read(put(tmp_path, pa.table({"body": broken})), text="body"))
    assert [isinstance(record, Document) for record in found] == [True, False, False, False, True]
    assert [record.line for record in found] == [1, 2, 3, 4, 5]
    told = [record.reason for record in found if isinstance(record, Reject)]
    assert "not UTF-8" in told[0] and "null" in told[1] and "NUL" in told[2]


def test_a_wrong_column_is_named_with_what_there_is(tmp_path: Path) -> None:
    path = put(tmp_path, pa.table({"content": ["a"], "id": [1]}))
    (bad,) = read(path)
    assert str(bad) == f"{path}: there is no column 'text'; the columns are 'content', 'id'"
    (bad,) = read(path, text="id")
    assert str(bad) == f"{path}: the column 'id' holds int64, not strings"


@pytest.mark.parametrize("name", ["zero_bytes.parquet", "garbage.parquet"])
def test_what_is_no_parquet_is_named(name: str) -> None:
    (bad,) = read(shared(f"dirty/broken/{name}"))
    assert isinstance(bad, Reject) and bad.line is None and f"{name}: not a whole Parquet file" in str(bad)


def test_a_file_cut_or_changed_gives_no_silent_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "ROWS", 100)
    texts = [f"{number} {number**9}" for number in range(3000)]
    path = put(tmp_path, pa.table({"text": texts}), row_group_size=500, compression="none", use_dictionary=False)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    (bad,) = read(path)
    assert isinstance(bad, Reject)
    changed = bytearray(content)
    changed[len(content) // 2 : len(content) // 2 + 3000] = b"\xff" * 3000
    path.write_bytes(changed)
    *kept, bad = read(path)
    assert isinstance(bad, Reject) and f"not a whole Parquet file after {len(kept)} rows" in str(bad)
    assert len(kept) >= 500
    assert [record.text for record in kept if isinstance(record, Document)] == texts[: len(kept)]


def test_a_flipped_bit_is_found_where_pages_have_checksums(tmp_path: Path) -> None:
    path = put(tmp_path, pa.table({"text": ["x" * 5000]}), compression="none", write_page_checksum=True)
    changed = bytearray(path.read_bytes())
    changed[2000] ^= 1
    path.write_bytes(changed)
    (bad,) = read(path)
    assert isinstance(bad, Reject) and "CRC" in str(bad)


def test_batches_are_bounded_by_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path, pa.table({"text": ["x" * 1000 + str(n) for n in range(300)]}), use_dictionary=False)
    monkeypatch.setattr(parquet, "BATCH", 10_000)
    with pq.ParquetFile(path) as table:
        assert 8 <= parquet._batch_rows(table, "text") <= 10
    assert len(list(read(path))) == 300
    assert list(read(put(tmp_path, pa.table({"text": pa.array([], pa.string())})))) == []
