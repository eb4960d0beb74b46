"""Any damage to a checkpoint's files is found: no flipped bit, cut, swap or zeroed block is ever loaded."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from danlu.checkpoint.keep import Checkpoint
from danlu.checkpoint.load import newest
from danlu.checkpoint.manifest import verify
from danlu.checkpoint.pieces import Piece
from danlu.checkpoint.save import Saver, Snapshot
from tests.unit.checkpoint.made import NOW, save

ALL = Checkpoint(keep_last=-1, asynchronous=False)


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_every_single_flipped_bit_is_found(tmp_path: Path) -> None:
    weight = torch.arange(12, dtype=torch.int16).reshape(4, 3)
    saver = Saver(tmp_path, NOW)
    stream = {"cpu": torch.tensor([1, 2, 3], dtype=torch.uint8)}
    saver.save(Snapshot(step=1, pieces={"w": Piece.whole(weight)}, facts={"rate": 0.1}, streams=stream, metric=1.5))
    folder = tmp_path / "step-000001"
    assert verify(folder) == []
    flips = 0
    for path in files(folder):
        content = path.read_bytes()
        with open(path, "r+b", buffering=0) as file:
            for at, byte in enumerate(content):
                for bit in range(8):
                    file.seek(at)
                    file.write(bytes([byte ^ 1 << bit]))
                    problems = verify(folder)
                    assert problems, f"bit {bit} of byte {at} of {path.name}"
                    flips += 1
                file.seek(at)
                file.write(bytes([byte]))
    assert verify(folder) == []
    print(f"{flips} flips in {len(files(folder))} files, all found")
    assert flips > 7000


def test_flips_in_a_larger_checkpoint_of_two_ranks_are_found_in_the_file_they_are_in(tmp_path: Path) -> None:
    save(tmp_path, 1, world=2, rows=20_000)
    folder = tmp_path / "step-000001"
    draw = random.Random(5)
    for _ in range(100):
        path = draw.choice(files(folder))
        at, bit = draw.randrange(path.stat().st_size), draw.randrange(8)
        with open(path, "r+b", buffering=0) as file:
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1 << bit]))
            problems = verify(folder)
            assert problems and problems[0].startswith(path.name), (path.name, at, bit, problems)
            file.seek(at)
            file.write(byte)
    assert verify(folder) == []


def cut_one(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def zero_block(path: Path) -> None:
    content = bytearray(path.read_bytes())
    start = len(content) // 2 // 4096 * 4096
    content[start : start + 4096] = bytes(len(content[start : start + 4096]))
    path.write_bytes(content)


def remove(path: Path) -> None:
    path.unlink()


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [cut_one, empty, longer, zero_block, remove, folder_instead])
@pytest.mark.parametrize("name", ["manifest.json", "rank-000.json", "rank-001.json", "rank-001.safetensors"])
def test_damage_to_any_file_falls_back_to_the_one_before_and_names_the_file(
    tmp_path: Path, damage: Callable[[Path], None], name: str
) -> None:
    save(tmp_path, 1, 2, world=2, settings=ALL, rows=3000)
    damage(tmp_path / "step-000002" / name)
    found = newest(tmp_path)
    assert found is not None and found.step == 1
    [said] = found.skipped
    assert said.startswith(f"step-000002 was skipped: {name}")


@pytest.mark.parametrize("name", ["rank-000.safetensors", "rank-000.json"])
def test_files_of_another_rank_or_step_are_found(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1, 2, world=2, settings=ALL, rows=3000)
    other = name.replace("000", "001")
    first, second = tmp_path / "step-000002" / name, tmp_path / "step-000002" / other
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)
    assert verify(tmp_path / "step-000002")
    second.write_bytes(first.read_bytes())
    first.write_bytes(kept)
    assert verify(tmp_path / "step-000002") == []
    shutil.copy(tmp_path / "step-000001" / name, first)
    assert verify(tmp_path / "step-000002")
