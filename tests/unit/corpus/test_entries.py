"""The cache: whole or not at all, whoever builds and whoever is killed."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from danlu.core.errors import InputError, Unhealthy
from danlu.corpus import entries
from danlu.files.megatron import Writer


def fill(folder: Path, ids: list[int], rejects: int = 0) -> None:
    with Writer(folder / "tokens", vocab_size=99, tokenizer="t", eos_id=0) as writer:
        writer.add(ids)
        writer.sources.append({"rejects": rejects})


def test_a_key_depends_on_every_fact() -> None:
    facts = {"content": "a", "tokenizer": "b", "kind": "text", "documents": "line", "on_bad": "stop"}
    keys = {entries.key(**facts), *(entries.key(**{**facts, name: "other"}) for name in facts)}
    assert len(keys) == 6 and all(len(key) == 32 for key in keys)
    assert entries.key(**facts) == entries.key(**dict(reversed(facts.items())))
    # A change of the golden means that every cache is made again: VERSION goes up with it.
    assert entries.key(**facts) == "a17afc587f78c399fdad40e01539b6bb"


def test_an_entry_is_there_when_it_is_whole(tmp_path: Path) -> None:
    assert entries.find(tmp_path, "k", tokenizer="t") == (None, "")
    with entries.build(tmp_path / "cache", "k") as folder:
        fill(folder, [1, 2, 0])
        assert entries.find(tmp_path / "cache", "k", tokenizer="t") == (None, "")
    shard, damage = entries.find(tmp_path / "cache", "k", tokenizer="t")
    assert shard is not None and shard.document(0).tolist() == [1, 2, 0] and not damage
    assert [file.name for file in (tmp_path / "cache").iterdir()] == ["k"]
    assert oct((tmp_path / "cache/k").stat().st_mode)[-3:] == "755"
    assert entries.find(tmp_path / "cache", "k", tokenizer="u")[1] == "its sidecar is of another tokenizer"


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), entries.build(tmp_path, "k") as folder:
        fill(folder, [1])
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_the_first_of_two_builders_is_kept(tmp_path: Path) -> None:
    with entries.build(tmp_path, "k") as one, entries.build(tmp_path, "k") as other:
        assert one != other
        fill(one, [1])
        fill(other, [2])
    shard, _ = entries.find(tmp_path, "k", tokenizer="t")
    assert shard is not None and shard.document(0).tolist() == [2]
    assert [file.name for file in tmp_path.iterdir()] == ["k"]


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.idx", "tokens.meta.json", "rejects.jsonl"])
def test_a_damaged_entry_is_not_taken(tmp_path: Path, name: str) -> None:
    with entries.build(tmp_path, "k") as folder:
        fill(folder, [1, 2, 3], rejects=1)
        (folder / entries.REJECTS).write_text("{}\n")
    assert entries.find(tmp_path, "k", tokenizer="t")[0] is not None
    file = tmp_path / "k" / name
    file.rename(file.with_suffix(".away"))
    shard, damage = entries.find(tmp_path, "k", tokenizer="t")
    assert shard is None and damage
    if name == "tokens.bin":
        file.write_bytes(b"\1\0\2\0\4\0")  # as long as it was
        assert "checksum" in entries.find(tmp_path, "k", tokenizer="t")[1]
    entries.drop(tmp_path, "k")
    entries.drop(tmp_path, "k")
    assert entries.find(tmp_path, "k", tokenizer="t") == (None, "")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_build_left_is_cleared_away_but_not_what_is_being_built(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom danlu.corpus import entries\n"
        "with entries.build(Path(sys.argv[1]), 'k') as folder:\n"
        "    (folder / 'tokens.bin').write_bytes(b'half')\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == -9
    (left,) = tmp_path.iterdir()
    assert entries.find(tmp_path, "k", tokenizer="t") == (None, "")
    long_ago = time.time() - 1000
    with entries.build(tmp_path, "other") as folder:
        entries.clear(tmp_path)
        assert left.exists()  # it may be a second old: no one knows yet
        os.utime(left, (long_ago, long_ago))
        os.utime(folder, (long_ago, long_ago))
        entries.clear(tmp_path)
        with entries.build(tmp_path, "k") as mine:
            assert not left.exists() and folder.exists()
            fill(mine, [1])
        fill(folder, [2])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["k", "other"]


@pytest.mark.parametrize(
    ("number", "kind", "told"),
    [
        (errno.ENOSPC, Unhealthy, "disk is full"),
        (errno.EROFS, InputError, "Read-only file system; choose another folder"),
        (errno.EACCES, InputError, "Permission denied; choose another folder"),
        (errno.ENOENT, InputError, "No such file or directory; choose another folder"),
    ],
)
def test_trouble_with_the_folder_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception], told: str
) -> None:
    def fail(**_: object) -> str:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(entries.tempfile, "mkdtemp", fail)
    with pytest.raises(kind, match=told), entries.build(tmp_path, "k"):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="choose another folder"), entries.build(tmp_path / "file", "k"):
        pass
