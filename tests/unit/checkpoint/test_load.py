from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from danlu.checkpoint.keep import Checkpoint
from danlu.checkpoint.load import Want, newest, open_checkpoint, portions, read, streams
from danlu.checkpoint.manifest import Damaged
from danlu.checkpoint.pieces import Piece
from danlu.checkpoint.save import Saver, Snapshot
from danlu.core.errors import InputError
from tests.unit.checkpoint.made import NOW, each_rank, holds, save, tensors

ALL = Checkpoint(keep_last=-1, asynchronous=False)


def test_newest_is_by_number_and_free_names_are_not_looked_at(tmp_path: Path) -> None:
    save(tmp_path, 9, 10, 99, 100, 900, 1000, 1234567, settings=ALL)
    for name in ("step-best", "step-9999999x", "mine", "step-99"):
        shutil.copytree(tmp_path / "step-000010", tmp_path / name)
    found = newest(tmp_path)
    assert found is not None and (found.step, found.path.name) == (1234567, "step-1234567")
    shutil.rmtree(tmp_path / "step-1234567")
    found = newest(tmp_path)
    assert found is not None and found.path.name == "step-001000"


def test_no_folder_and_an_empty_one_hold_none(tmp_path: Path) -> None:
    assert newest(tmp_path / "none") is None
    assert newest(tmp_path) is None


def test_damaged_ones_are_skipped_and_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1, 2, 3, 4, settings=ALL)
    (tmp_path / "step-000004" / "manifest.json").unlink()
    shard = tmp_path / "step-000003" / "rank-000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-20] ^= 4
    shard.write_bytes(content)
    found = newest(tmp_path)
    assert found is not None and found.step == 2
    assert found.skipped[0] == "step-000004 was skipped: manifest.json: missing"
    assert found.skipped[1].startswith("step-000003 was skipped: rank-000.safetensors: moment.step (bytes ")
    assert found.skipped[1].endswith("does not match its hash")
    assert [record.getMessage() for record in caplog.records] == list(found.skipped)
    holds(found)


def test_where_none_is_whole_nothing_is_started_anew(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "step-000001" / "rank-000.json").unlink()
    with pytest.raises(InputError, match=r"no checkpoint is whole \(step-000001 was skipped: rank-000.json: missing"):
        newest(tmp_path)


def test_a_checkpoint_under_another_steps_name_is_skipped(tmp_path: Path) -> None:
    save(tmp_path, 1)
    shutil.copytree(tmp_path / "step-000001", tmp_path / "step-000002")
    found = newest(tmp_path)
    assert found is not None and found.step == 1 and found.path.name == "step-000001"
    assert found.skipped == ("step-000002 was skipped: its manifest is of step 1",)


def pieces_of(whole: dict[str, torch.Tensor], rank: int, world: int, dim: int) -> dict[str, tuple[int, int]]:
    return {n: (t.shape[dim] * rank // world, t.shape[dim] * (rank + 1) // world) for n, t in whole.items()}


@pytest.mark.parametrize("check", [True, False])
def test_any_layout_from_any_other(tmp_path: Path, check: bool) -> None:
    whole = {"a": torch.arange(60.0).reshape(10, 6), "b": torch.randn(7, 5, 4).bfloat16(), "c": torch.arange(9)}
    layouts = [(4, 0), (2, -1), (3, 0), (1, 0), (5, -1)]  # ranks, and along which dimension each tensor is cut
    for step, (world, dim) in enumerate(layouts):
        if step:
            found = newest(tmp_path)
            assert found is not None and found.step == step - 1
        source = found if step else None

        def work(rank: int, world: int = world, dim: int = dim, step: int = step, source=source) -> None:
            edges = pieces_of(whole, rank, world, dim)
            want, offsets = {}, {}
            for name, tensor in whole.items():
                first, last = edges[name]
                axis = dim % tensor.dim()
                offset = tuple(first if d == axis else 0 for d in range(tensor.dim()))
                local = tuple(last - first if d == axis else n for d, n in enumerate(tensor.shape))
                want[name] = Want(tuple(tensor.shape), offset, local, tensor.dtype)
                offsets[name] = offset
            if source is None:
                mine = {n: t.narrow(dim % t.dim(), edges[n][0], edges[n][1] - edges[n][0]) for n, t in whole.items()}
            else:
                mine = read(source, want, check=check)
            for name, tensor in whole.items():
                first, last = edges[name]
                assert torch.equal(mine[name], tensor.narrow(dim % tensor.dim(), first, last - first))
            saver = Saver(tmp_path, ALL, rank=rank, world=world, attempt=f"s{step}", wait_seconds=20)
            pieces = {n: Piece(tensor=t, shape=tuple(whole[n].shape), offset=offsets[n]) for n, t in mine.items()}
            saver.save(Snapshot(step=step, pieces=pieces, facts={}))

        for result in each_rank(world, work):
            assert result is None, result


def test_all_misfits_stand_in_one_message(tmp_path: Path) -> None:
    save(tmp_path, 1)
    found = newest(tmp_path)
    assert found is not None
    wanted = {name: Want.whole(tensor) for name, tensor in tensors(1).items()}
    wanted["model.extra"] = wanted.pop("model.half")
    wanted["model.weight"] = Want((3, 8), (0, 0), (3, 8), torch.float32)
    wanted["moment.step"] = Want((), (), (), torch.float64)
    with pytest.raises(InputError) as refusal:
        read(found, wanted)
    message = str(refusal.value)
    assert "4 of 5 names found" in message
    for part in (
        "missing model.extra",
        "unknown model.half",
        "model.weight is F32 [8, 3], not torch.float32 [3, 8]",
        "moment.step is F32 [], not torch.float64 []",
    ):
        assert part in message


def test_names_that_other_ranks_want_are_no_strangers(tmp_path: Path) -> None:
    save(tmp_path, 1)
    found = newest(tmp_path)
    assert found is not None
    whole = tensors(1)
    mine = {"model.weight": Want.whole(whole["model.weight"])}
    got = read(found, mine, elsewhere=whole.keys())
    assert list(got) == ["model.weight"] and torch.equal(got["model.weight"], whole["model.weight"])
    with pytest.raises(InputError, match=r"missing model\.other"):
        read(found, mine, elsewhere=[*whole, "model.other"])


def test_streams_come_back_to_as_many_ranks_only(tmp_path: Path) -> None:
    save(tmp_path, 3, world=2)
    found = newest(tmp_path)
    assert found is not None
    for rank in range(2):
        state = streams(found, rank, 2)
        assert state is not None and state["cpu"].tolist() == [rank, 3]
    assert streams(found, 0, 1) is None


def test_a_flip_after_the_check_is_found_by_the_read(tmp_path: Path) -> None:
    save(tmp_path, 1)
    found = newest(tmp_path)
    assert found is not None
    wanted = {name: Want.whole(tensor) for name, tensor in tensors(1).items()}
    shard = found.path / "rank-000.safetensors"
    whole = shard.read_bytes()
    for part in found.tables[0].pieces:
        if part.span.size:
            changed = bytearray(whole)
            changed[part.span.start] ^= 1
            shard.write_bytes(changed)
            with pytest.raises(Damaged, match=f"rank-000.safetensors: {part.name} does not match"):
                read(found, wanted)


def test_the_librarys_own_reader_opens_a_shard(tmp_path: Path) -> None:
    save(tmp_path, 6)
    got = load_file(tmp_path / "step-000006" / "rank-000.safetensors")
    for name, tensor in tensors(6).items():
        assert torch.equal(got[name], tensor) and got[name].dtype == tensor.dtype
    assert got["stream/cpu"].tolist() == [0, 6]


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    table = tmp_path / "step-000001" / "rank-000.json"
    table.rename(tmp_path / "elsewhere.json")
    table.symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(Damaged, match=r"rank-000.json: not a plain file"):
        open_checkpoint(tmp_path / "step-000001")


def test_a_checkpoint_moved_aside_is_found_and_put_back(tmp_path: Path) -> None:
    save(tmp_path, 5)
    (tmp_path / "step-000005").rename(tmp_path / "old-000005")
    found = newest(tmp_path)
    assert found is not None and found.path.name == "old-000005"
    Saver(tmp_path, NOW)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000005"]


def test_portions_are_what_read_gives_and_refuse_as_it_does(tmp_path: Path) -> None:
    save(tmp_path, 5)
    found = newest(tmp_path)
    assert found is not None
    wanted = {name: Want.whole(tensor) for name, tensor in tensors(5).items()}
    whole = read(found, wanted)
    for at_once, count in ((1, len(wanted)), (2**30, 1)):
        given = list(portions(found, wanted, at_once=at_once))
        assert len(given) == count
        together = {name: tensor for some in given for name, tensor in some.items()}
        assert together.keys() == whole.keys()
        assert all(torch.equal(together[name], whole[name]) for name in whole)
    name = sorted(wanted)[-1]
    wrong = wanted | {name: wanted[name]._replace(shape=(7, 7)), "more": wanted[name]}
    with pytest.raises(InputError) as said:
        next(portions(found, wrong, at_once=1))
    assert "missing more" in str(said.value) and f"{name} is " in str(said.value)
