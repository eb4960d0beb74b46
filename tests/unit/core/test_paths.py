"""A run folder as a path."""

from __future__ import annotations

from pathlib import Path

from danlu.core.paths import RunFolder


def test_a_run_folder_is_taken_where_a_path_is(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.events.write_text("{}\n")
    assert (Path(folder) / "events.jsonl").read_text() == "{}\n"
    assert f"{folder}" == str(tmp_path) and Path(folder) == tmp_path
