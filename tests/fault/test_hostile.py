"""Files made to do harm: nothing in them is run, nothing outside the folder is read, nothing grows without bound."""

from __future__ import annotations

import json
import os
import pickle
import resource
from pathlib import Path

import psutil
import pytest
import torch

from danlu.checkpoint.load import newest
from danlu.checkpoint.manifest import MANIFEST, Damaged, read_manifest, read_table, seal, unseal, verify
from danlu.core.errors import InputError
from danlu.data import tokenizer
from danlu.models import weights
from tests.unit.checkpoint.made import save
from tests.unit.models.tiny import FAMILIES, lively


class Marker:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("name", [MANIFEST, "rank-000.json", "rank-000.safetensors"])
def test_a_pickle_in_the_place_of_any_file_is_refused_and_not_run(tmp_path: Path, name: str) -> None:
    folder, marker = tmp_path / "checkpoints", tmp_path / "ran"
    content = pickle.dumps(Marker(marker))
    pickle.loads(content)
    assert marker.exists()  # it would
    marker.unlink()
    save(folder, 1)
    (folder / "step-000001" / name).write_bytes(content)
    with pytest.raises(InputError, match=name):
        newest(folder)
    for extra in ("random.pkl", "optimizer.pt", ".metadata"):
        (folder / "step-000001" / extra).write_bytes(content)
    verify(folder / "step-000001")
    assert not marker.exists()


def body(folder: Path, name: str) -> dict:
    value = unseal((folder / name).read_bytes(), name)
    del value["hash"]
    return value


def part(**changes: object) -> list[object]:
    facts = {"name": "w", "dtype": "F32", "shape": [2], "offset": [0], "local": [2], "start": 8, "size": 8, "hash": ""}
    return list((facts | changes).values())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shape": [1 << 40], "local": [1 << 40]}, "8 bytes do not make F32"),
        ({"offset": [1]}, "does not fit into"),
        ({"offset": [-1]}, "-1 is no count"),
        ({"shape": [2.0]}, "2.0 is no count"),
        ({"shape": [True]}, "True is no count"),
        ({"shape": [2, 1]}, "has not as many dimensions"),
        ({"start": 16}, "does not begin where the tensor before it ends"),
        ({"dtype": "O"}, "KeyError"),
        ({"start": 1 << 70}, "is no count"),
    ],
)
def test_tables_that_lie_are_refused(changes: dict[str, object], said: str) -> None:
    table = {
        "format": "danlu checkpoint",
        "version": 1,
        "rank": 0,
        "step": 1,
        "size": 16,
        "facts": "",
        "header": [8, ""],
        "pieces": [part()],
        "streams": [],
    }
    read_table(seal(table), "rank-000.json")
    with pytest.raises(Damaged, match=f"rank-000.json: .*{said}"):
        read_table(seal(table | {"pieces": [part(**changes)]}), "rank-000.json")


def test_a_manifest_that_lies_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    folder = tmp_path / "step-000001"
    good = body(folder, MANIFEST)
    for changes, said in [
        ({"version": 2}, "has format version 2; this danlu reads version 1"),
        ({"format": "other"}, "not of a danlu checkpoint"),
        ({"world": 2}, "1 ranks of 2"),
        ({"step": "1"}, "'1' is no count"),
        ({"ranks": [{"size": 1}]}, "KeyError 'hash'"),
        ({"facts": 3}, "TypeError"),
    ]:
        (folder / MANIFEST).write_bytes(seal(good | changes))
        with pytest.raises(Damaged, match=said):
            read_manifest(folder)
    (folder / MANIFEST).write_bytes(seal(good))
    assert verify(folder) == []


def test_names_in_a_manifest_are_not_followed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    folder = tmp_path / "step-000001"
    changed = body(folder, MANIFEST)
    changed["ranks"][0] |= {"table": "../../secret.json", "shard": "/etc/passwd"}
    (folder / MANIFEST).write_bytes(seal(changed))
    assert verify(folder) == []  # files are known by rank; what a name says is for people


def test_deep_and_endless_json_is_refused(tmp_path: Path) -> None:
    from danlu.checkpoint.shard import digest

    for inner in ("[" * 200_000, '{"a":' * 100_000, "NaN", '{"a": Infinity, "hash": ""}', "[1]", "9" * 10_000):
        text = inner.encode()
        content = text + b',\n"hash": "%s"\n}\n' % digest(text).encode()
        with pytest.raises(Damaged):
            unseal(content, "manifest.json")
    save(tmp_path, 1)
    with open(tmp_path / "step-000001" / MANIFEST, "r+b") as file:
        file.truncate(1 << 40)  # a hole: takes no room, would take all memory
    assert verify(tmp_path / "step-000001") == [f"{MANIFEST}: larger than {64 << 20} bytes"]


def test_our_own_files_are_plain_json(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for name in (MANIFEST, "rank-000.json"):
        assert json.loads((tmp_path / "step-000001" / name).read_text())["step"] == 1


def header(text: bytes, *, size: int | None = None, body: bytes = b"") -> bytes:
    """A safetensors file's bytes; of a size that may be a lie."""
    return (len(text) if size is None else size).to_bytes(8, "little") + text + body


def entry(start: int, stop: int, shape: list[int], dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


LIES: dict[str, bytes] = {
    "nothing": b"",
    "a header longer than the file": header(b"{}", size=1 << 62),
    "a header of 100 MB and one": header(b"{}", size=100_000_001),
    "no JSON": header(b"[[[["),
    "too deep": header(b'{"a":' * 50_000),
    "two tensors in one place": header(
        json.dumps({"a": entry(0, 8, [2]), "b": entry(0, 8, [2])}).encode(), body=bytes(8)
    ),
    "a gap": header(json.dumps({"a": entry(8, 16, [2])}).encode(), body=bytes(16)),
    "offsets beyond the end": header(json.dumps({"a": entry(0, 1 << 40, [1 << 38])}).encode(), body=bytes(8)),
    "offsets that go backwards": header(json.dumps({"a": entry(8, 0, [2])}).encode(), body=bytes(8)),
    "a shape that overflows": header(json.dumps({"a": entry(0, 8, [1 << 62, 1 << 62])}).encode(), body=bytes(8)),
    "more elements than bytes, as a view of stride 0 would be": header(
        json.dumps({"a": entry(0, 4, [1 << 40])}).encode(), body=bytes(4)
    ),
    "a negative size": header(b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', body=bytes(4)),
    "no such type": header(json.dumps({"a": entry(0, 8, [2], "PICKLE")}).encode(), body=bytes(8)),
    "a tail that no tensor covers": header(json.dumps({"a": entry(0, 8, [2])}).encode(), body=bytes(4096)),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_model_file_that_lies_is_refused_in_little_memory(tmp_path: Path, lie: str) -> None:
    """Where little more may be mapped: who believed a size would fail in another way."""
    family = FAMILIES["llama"]
    weights.save(tmp_path, family, lively(family).named_parameters(), dtype=torch.float32)
    weights.load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(LIES[lie])
    before = resource.getrlimit(resource.RLIMIT_AS)
    most = psutil.Process().memory_info().vms + (256 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        with pytest.raises(InputError, match=r"model\.safetensors"):
            dict(weights.load(tmp_path)[1])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_a_pickle_for_a_tokenizer_is_refused_and_not_run(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "ran"
    (tmp_path / name).write_bytes(pickle.dumps(Marker(marker)))
    (tmp_path / "tokenizer.pkl").write_bytes(pickle.dumps(Marker(marker)))
    with pytest.raises(InputError):
        tokenizer.load(str(tmp_path / name))
    with pytest.raises(InputError):
        tokenizer.load(str(tmp_path / "tokenizer.pkl"))
    assert not marker.exists()
