"""The world: what ranks tell each other, what a lost one looks like, streams that depend on nothing else."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from danlu.core import world as worlds
from danlu.core.errors import InputError, Unhealthy
from danlu.core.world import World
from tests.ranks import Ranks


def test_alone_nothing_is_waited_for() -> None:
    alone = World()
    worlds.join(alone, backend="gloo")
    worlds.hurry()
    worlds.meet(alone)
    worlds.leave()
    assert not dist.is_initialized()
    assert worlds.once(alone, lambda: 3) == 3 and worlds.together(alone, ("a", "b")) == ("a", "b")


def test_here_is_what_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worlds.here() == World(0, 1, 0)
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert worlds.here() == World(5, 8, 1) and not worlds.here().first


def told(world: World) -> dict[str, object]:
    calls: list[int] = []

    def work() -> str:
        calls.append(world.rank)
        return f"from {world.rank}"

    def refuse() -> None:
        raise InputError("no such file")

    found: dict[str, object] = {"once": worlds.once(world, work), "first": worlds.first_only(world, work)}
    try:
        worlds.once(world, refuse)
    except InputError as refusal:
        found["refusal"] = (str(refusal), refusal.shared, refusal.code)
    found["calls"] = calls
    found["together"] = worlds.together(world, (f"sample {world.rank}",) * (world.rank + 1))
    worlds.meet(world)
    return found


def test_the_first_works_and_all_know(ranks: Ranks) -> None:
    first, second = ranks.run(told, size=2)
    for each in (first, second):
        assert each["once"] == "from 0"
        assert each["refusal"] == ("no such file", True, 2)  # raised on all, said by one
        assert each["together"] == ("sample 0", "sample 1", "sample 1")
    assert first["calls"] == [0, 0] and second["calls"] == []
    assert first["first"] == "from 0" and second["first"] is None


def late(world: World) -> tuple[bool, float]:
    worlds.hurry(seconds=1)
    begun = time.monotonic()
    if world.rank == 1:
        time.sleep(3)
        return False, 0.0
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return worlds.lost(error), time.monotonic() - begun
    return False, 0.0


def test_in_a_hurry_a_rank_that_does_not_answer_is_lost(ranks: Ranks) -> None:
    lost, waited = ranks.run(late, size=2)[0]
    assert lost and 0.9 < waited < 2.9
    ranks.close()  # its connections are no good any more


def test_what_is_lost_and_what_is_not() -> None:
    said = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"
    assert worlds.lost(RuntimeError(said))
    assert not worlds.lost(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not worlds.lost(ValueError(said)) and not worlds.lost(Unhealthy("gloo"))


def test_streams_depend_on_their_names_alone() -> None:
    # b2sum -l 64 of the bytes 31 1f 61 1f 32, read from the low end, without its lowest bit: a run must be the same run
    # in every version.
    assert worlds.stream(1, "a", 2) == 9066666090510628820
    assert (
        len({worlds.stream(1, "a", 2), worlds.stream(2, "a", 2), worlds.stream(1, "a2"), worlds.stream(1, "a", 3)}) == 4
    )
    assert 0 <= worlds.stream(1, "a") < 2**63
    assert torch.equal(
        torch.rand(2, generator=worlds.generator(1, "x")), torch.rand(2, generator=worlds.generator(1, "x"))
    )


def test_neighbours_are_the_other_ranks_of_this_machine(ranks: Ranks) -> None:
    first, second = ranks.run(worlds.neighbours, size=2)
    assert len(first) == len(second) == 1 and first != second
    assert not worlds.gone(first + second)
    ranks.close()
    assert worlds.gone(first) and worlds.gone(second) and not worlds.gone(())
