"""What is asked to leave the device, and what of it is done."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from danlu.core.errors import InputError
from danlu.memory.offload import Offload, choose
from danlu.memory.places import File
from danlu.memory.plan import mistakes

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_on_a_cpu_only_a_file_is_another_place(tmp_path: Path) -> None:
    assert choose([], None, CPU) == Offload()
    found = choose(["weights", "gradients", "optimizer", "activations"], None, CPU)
    assert (found.weights, found.states, found.activations) == (False, "beside", False)
    assert found.said == (
        "memory.offload: on this cpu weights and gradients and optimizer and activations are in the host's memory "
        "already: nothing is moved",
    )
    found = choose(["optimizer"], str(tmp_path), CPU)
    assert found == Offload(states="file", folder=tmp_path) and isinstance(found.place(), File)
    assert choose(["optimizer", "activations"], str(tmp_path), CPU).said


def test_on_another_device_each_part_goes(tmp_path: Path) -> None:
    assert choose(["activations"], None, CUDA) == Offload(activations=True)
    assert choose(["optimizer"], None, CUDA) == Offload(states="host")
    assert choose(["optimizer"], str(tmp_path), CUDA) == Offload(states="file", folder=tmp_path)
    all_three = choose(["weights", "gradients", "optimizer"], None, CUDA)
    assert all_three == Offload(weights=True) and isinstance(all_three.policy(), CPUOffloadPolicy)
    assert Offload().place() is None


def test_what_is_elsewhere_is_told(tmp_path: Path) -> None:
    assert Offload().told() == ()
    [file] = choose(["optimizer"], str(tmp_path), CPU).told()
    assert file.startswith(f"optimizer states lie in a file in {tmp_path} between updates")
    assert Offload(weights=True, activations=True).told() == (
        "weights, gradients and optimizer states are kept on the host, and updated there",
        "activations wait on the host for the backward",
    )
    assert Offload(states="host").told() == ("optimizer states lie in the host's memory between updates",)


@pytest.mark.parametrize("parts", [["weights"], ["gradients"], ["weights", "optimizer"], ["gradients", "activations"]])
def test_weights_and_gradients_leave_together(parts: list[str]) -> None:
    [(field, said)] = mistakes(parts, None)
    assert field == "memory.offload"
    assert all(part in said for part in {"weights", "gradients", "optimizer"} - set(parts))


def test_a_folder_without_states_for_it_is_a_mistake(tmp_path: Path) -> None:
    assert [field for field, _ in mistakes(["activations"], "x")] == ["memory.offload_folder"]
    assert not list(mistakes(["optimizer"], "x")) and not list(mistakes([], None))
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="offload_folder"):
        choose(["optimizer"], str(tmp_path / "file"), CPU)


def test_a_folder_that_is_memory_itself_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the innermost of the file systems that the folder lies on."""

    def parts(*kinds: str) -> list[SimpleNamespace]:
        places = ("/", str(tmp_path), str(tmp_path / "deeper"))
        return [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in zip(places, kinds)]

    for kinds, told in ((("ext4", "tmpfs", "ext4"), True), (("tmpfs", "ext4", "tmpfs"), False), ((), False)):
        monkeypatch.setattr(psutil, "disk_partitions", lambda all, kinds=kinds: parts(*kinds))
        for device in (CPU, CUDA):
            found = choose(["optimizer"], str(tmp_path / "states"), device)
            assert bool(found.said) == told and found.states == "file"
