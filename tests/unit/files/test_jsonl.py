"""One JSON object a line: what is good is read, what is bad has its line, its byte and its reason."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danlu.files.document import Document, Reject
from danlu.files.jsonl import read
from tests.shared import shared


def put(folder: Path, content: bytes, name: str = "f.jsonl") -> Path:
    (folder / name).write_bytes(content)
    return folder / name


def parted(path: Path, **how: object) -> tuple[list[Document], list[Reject]]:
    found = list(read(path, **how))  # type: ignore[arg-type]
    return [r for r in found if isinstance(r, Document)], [r for r in found if isinstance(r, Reject)]


USABLE = st.text(st.characters(codec="utf-8", exclude_characters="\0"))


@settings(deadline=None)
@given(st.lists(USABLE, max_size=6), st.booleans(), st.booleans(), st.sampled_from(["\n", "\r\n"]))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, many: list[str], packed: bool, plain: bool, end: str
) -> None:
    content = "".join(json.dumps({"text": one, "n": 1}, ensure_ascii=plain) + end for one in many).encode()
    path = put(tmp_path_factory.mktemp("jsonl"), gzip.compress(content) if packed else content)
    assert list(read(path)) == [Document(one, str(path), number) for number, one in enumerate(many, 1)]


def test_line_ends_inside_a_text_are_text(tmp_path: Path) -> None:
    first = "a\u2028b\u0085c\x0bd\re"
    content = "\ufeff" + json.dumps({"text": first}, ensure_ascii=False) + "\n" + json.dumps({"text": "second"})
    documents, rejects = parted(put(tmp_path, content.encode()))
    assert [one.text for one in documents] == [first, "second"] and not rejects


def test_the_bad_lines_of_a_real_file() -> None:
    """The list of good and bad lines is the data's own; of what it leaves open, we take 14, 15 and 17 and refuse 18."""
    facts = {}
    for line in shared("dirty/manifest.jsonl").read_text().splitlines():
        facts[json.loads(line)["file"]] = json.loads(line)
    expected = facts["broken/bad_lines.jsonl"]["expected"]
    path = shared("dirty/broken/bad_lines.jsonl")
    documents, rejects = parted(path)
    assert [one.line for one in rejects] == sorted([*expected["bad_lines"], 18])
    assert [one.line for one in documents] == [1, 6, 14, 15, 17, 21]
    ids = [json.loads(path.read_bytes().split(b"\n")[one.line - 1].decode("utf-8-sig"))["id"] for one in documents]
    assert set(expected["strictly_good_ids"]) <= set(ids)
    assert documents[2].text == "duplicate key"  # the last of two


@pytest.mark.parametrize(
    ("name", "documents", "rejects"),
    [
        ("empty.jsonl", 0, 0),
        ("empty.jsonl.gz", 0, 0),
        ("crlf.jsonl", 20, 0),
        ("no_trailing_newline.jsonl", 20, 0),
        ("multi_member.jsonl.gz", 20, 0),
        ("not_gzip.jsonl.gz", 20, 0),
        ("gzip_without_suffix.jsonl", 20, 0),
        ("huge_line.jsonl.gz", 5, 0),
        ("bad_crc.jsonl.gz", 200, 1),
        ("truncated.jsonl.gz", 138, 1),
        ("mixed_schema.jsonl", 4, 2),
        ("nul_bytes.jsonl", 18, 1),
        ("json_array.jsonl", 0, 1),
    ],
)
def test_damaged_files(name: str, documents: int, rejects: int) -> None:
    """The numbers of rows are those of the data's own manifest."""
    good, bad = parted(shared(f"dirty/broken/{name}"))
    assert (len(good), len(bad)) == (documents, rejects)
    assert not any("\r" in one.text for one in good)
    assert all(name in str(one) for one in bad)


def test_damage_is_told_with_what_was_read() -> None:
    (bad,) = parted(shared("dirty/broken/truncated.jsonl.gz"))[1]
    assert str(bad).endswith("line 139: the gzip data is cut short after 138 whole lines")
    (bad,) = parted(shared("dirty/broken/bad_crc.jsonl.gz"))[1]
    assert "checksum does not fit after 200 whole lines" in str(bad)
    (bad,) = parted(shared("dirty/broken/json_array.jsonl"))[1]
    assert "is a JSON array, not one object a line" in str(bad)


def test_a_file_cut_between_two_members_cannot_be_noticed_but_counted(tmp_path: Path) -> None:
    """The format has no total: what is left is read, and its number of records is what can be compared."""
    members = [gzip.compress(b"".join(b'{"text": "%d"}\n' % n for n in range(k, k + 500))) for k in range(0, 2000, 500)]
    assert len(parted(put(tmp_path, b"".join(members)))[0]) == 2000
    documents, rejects = parted(put(tmp_path, b"".join(members[:3])))
    assert (len(documents), len(rejects)) == (1500, 0)


def test_the_place_of_a_bad_byte(tmp_path: Path) -> None:
    content = b'{"text": "a"}\n{"text": "b"}\n{"text": "\xe6\x28"}\n{"text": "d"}\n'
    for path in (put(tmp_path, content), put(tmp_path, gzip.compress(content), "f.jsonl.gz")):
        documents, (bad,) = parted(path)
        assert [one.text for one in documents] == ["a", "b", "d"]
        assert (bad.line, bad.byte) == (3, 38) and content[38:40] == b"\xe6\x28"
        assert str(bad).startswith(f"{path}, line 3, byte 38: not UTF-8 at e6 28")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "a\\u0000b"}', "NUL"),
        ('{"text": "a\\ud83d"}', "half a surrogate pair (U+D83D)"),
        ('{"text": 3}', "'text' is a number, not a string"),
        ('{"text": true}', "'text' is true or false, not a string"),
        ('{"text": null}', "'text' is null, not a string"),
        ('{"text": ["a"]}', "'text' is a list, not a string"),
        ('{"body": "a", "id": 1}', "no field 'text'; its fields are 'body', 'id'"),
        ("{}", "no field 'text'; its fields are none"),
        ('{"text": "a"', "not JSON"),
        ('{"text": "a\tb"}', "not JSON (Invalid control character"),
        ("null", "the record is null, not an object"),
        ('{"text": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
        ('{"text": "a", "x": ' + "9" * 5000 + "}", "not readable"),
    ],
)
def test_bad_records(tmp_path: Path, line: str, reason: str) -> None:
    content = f'{{"text": "before"}}\n{line}\n{{"text": "after"}}\n'
    documents, (bad,) = parted(put(tmp_path, content.encode()))
    assert [one.text for one in documents] == ["before", "after"]
    assert bad.line == 2 and reason in bad.reason


def test_a_whole_surrogate_pair_is_a_character(tmp_path: Path) -> None:
    assert parted(put(tmp_path, b'{"text": "\\ud83d\\ude00"}'))[0][0].text == "😀"


def test_other_fields_may_hold_anything(tmp_path: Path) -> None:
    metas: list[object] = [None] * 2000 + ["a string", {"an": "object"}, [1], float("nan"), 10**30]
    rows = [json.dumps({"text": str(n), "meta": meta}) for n, meta in enumerate(metas)]
    documents, rejects = parted(put(tmp_path, "\n".join(rows).encode()))
    assert len(documents) == len(metas) and not rejects


def test_another_field(tmp_path: Path) -> None:
    assert parted(put(tmp_path, b'{"content": "a"}'), text="content")[0][0].text == "a"


def test_a_field_that_is_never_there_ends_the_file(tmp_path: Path) -> None:
    content = b'{"content": "a", "id": 1}\n' * 1000
    found = list(read(put(tmp_path, content)))
    assert len(found) == 100 and isinstance(found[-1], Reject)
    assert str(found[-1]).endswith(
        "none of the first 100 records has a field 'text'; the last of them has 'content', 'id'"
    )
    late = b'{"text": "a"}\n' + content
    assert len(list(read(put(tmp_path, late)))) == 1001


def test_one_giant_record_between_small_ones(tmp_path: Path) -> None:
    giant = "x" * 60_000_000
    path = put(tmp_path, b'{"text": "a"}\n' + json.dumps({"text": giant}).encode() + b'\n{"text": "b"}\n')
    assert [len(r.text) for r in read(path) if isinstance(r, Document)] == [1, 60_000_000, 1]
    documents, (bad,) = parted(path, limit=1 << 20)
    assert [one.text for one in documents] == ["a", "b"]
    assert bad.line == 2 and "longer than 1,048,576 bytes (LINE_LIMIT)" in bad.reason


def test_a_small_file_that_unpacks_to_a_flood_ends_at_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(256):
            file.write(bytes(1 << 20))
    assert path.stat().st_size < 2 << 20
    bad = next(read(path))
    assert isinstance(bad, Reject) and "longer than 67,108,864 bytes (LINE_LIMIT)" in bad.reason
