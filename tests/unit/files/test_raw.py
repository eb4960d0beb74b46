"""Any raw file by its kind, and the files that paths name."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from danlu.core.errors import InputError
from danlu.files.document import Document
from danlu.files.megatron import Writer
from danlu.files.raw import find, kind_of, read
from tests.shared import shared


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.txt", "text"),
        ("a.TXT", "text"),
        ("a.txt.gz", "text"),
        ("a.b.jsonl", "jsonl"),
        ("a.jsonl.gz", "jsonl"),
        ("a.parquet", "parquet"),
        ("a.json", None),
        ("a.csv", None),
        ("a.gz", None),
        ("txt", None),
    ],
)
def test_kinds(name: str, kind: str | None) -> None:
    assert kind_of(Path(name)) == kind


def test_each_kind_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\ntwo\n"))
    (tmp_path / "b.jsonl").write_text('{"body": "three"}\n')
    assert [r.text for r in read(tmp_path / "a.txt.gz", split="line") if isinstance(r, Document)] == ["one", "two"]
    assert [r.text for r in read(tmp_path / "b.jsonl", text="body") if isinstance(r, Document)] == ["three"]
    assert len(list(read(shared("pretrain/c4_small_train.parquet")))) > 50


def test_what_cannot_be_read_is_refused_with_what_can(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x")
    for refuse in (lambda: read(tmp_path / "a.csv"), lambda: find([tmp_path / "a.csv"], announce=print)):
        with pytest.raises(InputError, match=r"a\.csv is of a kind that cannot be read; raw text comes as \.txt"):
            refuse()


def lay(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def test_folders_globs_and_shards(tmp_path: Path) -> None:
    lay(tmp_path, "d/b.txt", "d/a.jsonl", "d/sub/c.txt", "d/x.csv", "d/.hidden.txt", "d/.git/e.txt", "d/B.txt", "z.txt")
    with Writer(tmp_path / "d/m.n", vocab_size=9, tokenizer="t", eos_id=0) as writer:
        writer.add([1])
    said: list[str] = []

    def names(*paths: str) -> list[str]:
        said.clear()
        found = find([tmp_path / path for path in paths], announce=said.append)
        return [str(path.relative_to(tmp_path)) for path in found]

    assert names("d") == ["d/B.txt", "d/a.jsonl", "d/b.txt", "d/m.n", "d/sub/c.txt"]
    assert said == [f"{tmp_path}/d: 1 files of other kinds are left out (x.csv)."]
    assert names("d/*.txt") == ["d/B.txt", "d/b.txt"]
    assert names("d/**/*.txt") == ["d/B.txt", "d/b.txt", "d/sub/c.txt"]
    assert names("*") == ["z.txt"]
    assert names("d/s*") == ["d/sub/c.txt"]
    assert names("d/m.n", "z.txt") == ["d/m.n", "z.txt"]
    assert names("d/m.n.bin", "d/m.n.idx") == ["d/m.n"] and "named twice" in said[0]
    assert names("z.txt", "d/b.txt", "d/../z.txt") == ["z.txt", "d/b.txt"] and "named twice" in said[0]


def test_nothing_found_is_told(tmp_path: Path) -> None:
    lay(tmp_path, "d/x.csv", "[a].txt")
    for path, reason in (
        ("no.txt", "does not exist"),
        ("no*.txt", r"no\*\.txt matches no file"),
        ("d", "the folder .*d holds no file that can be read; raw text comes as"),
        ("d/*", "matches no file that can be read"),
        ("x.txt/a.txt", "does not exist"),
        ("y" * 300, "File name too long"),
    ):
        with pytest.raises(InputError, match=reason):
            find([tmp_path / path], announce=print)
    assert find([tmp_path / "[a].txt"], announce=print) == [tmp_path / "[a].txt"]  # a name, though it looks like a glob
