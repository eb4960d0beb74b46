from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from danlu.checkpoint import disk as disks
from danlu.checkpoint.disk import Disk, write_file


def test_short_writes_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda handle, view: real(handle, bytes(view[:3])))
    write_file(Disk(), tmp_path / "f", [b"0123456789", memoryview(b"abcd")])
    monkeypatch.undo()
    assert (tmp_path / "f").read_bytes() == b"0123456789abcd"


def test_a_file_of_that_name_is_emptied_first(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"longer than the new one")
    write_file(Disk(), tmp_path / "f", [b"new"])
    assert (tmp_path / "f").read_bytes() == b"new"


@pytest.mark.parametrize(("code", "raised"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)])
def test_a_file_system_without_folder_sync_is_lived_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, raised: bool
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(code, "injected")

    monkeypatch.setattr(disks, "make_durable", refuse)
    if raised:
        with pytest.raises(OSError, match="injected"):
            Disk().sync_folder(tmp_path)
    else:
        Disk().sync_folder(tmp_path)


def test_removing_takes_folders_files_links_and_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "file").write_text("")
    for name in ("folder", "link", "file", "none", "kept/none"):
        Disk().remove(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
