"""Chosen updates are traced, and what took their time is told."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from danlu.monitor.profile import Profile, Tracer, overlap, summary, total, union

CPU = torch.device("cpu")


def event(name: str, begin: float, end: float, *, device: bool = False) -> SimpleNamespace:
    times = SimpleNamespace(start=begin, end=end, elapsed_us=lambda: end - begin)
    kind = DeviceType.CUDA if device else DeviceType.CPU
    return SimpleNamespace(name=name, time_range=times, device_type=kind, self_cpu_time_total=end - begin)


def trace(folder, *, updates: int, start: int = 0, **settings: int) -> list[str]:
    said: list[str] = []
    tracer = Tracer(Profile(**settings), folder, 1, CPU, said.append)
    weight = torch.ones(8, 8)
    for step in range(start + 1, start + updates + 1):
        with tracer.update(step, lambda: 0.25):
            for _ in range(step):  # update n makes n products: the sum says which were traced
                torch.mm(weight, weight)
        torch.mm(weight, weight)  # what lies between updates, such as an evaluation, does too
    tracer.close()
    return said


def test_exactly_the_updates_asked_for_are_in_the_trace(tmp_path):
    said = trace(tmp_path, updates=9, from_step=4, steps=3)
    assert said == [f"Updates 4 to 6 are traced: {tmp_path / 'rank-1.txt'}"]
    with gzip.open(tmp_path / "rank-1.json.gz") as file:
        names = Counter(each.get("name") for each in json.load(file)["traceEvents"])
    assert names["aten::mm"] == 4 + 1 + 5 + 1 + 6
    page = (tmp_path / "rank-1.txt").read_text()
    assert page.startswith("3 updates in ") and "waiting for data: 0.750 s" in page
    row = next(line.split() for line in page.splitlines() if line.startswith("aten::mm "))
    assert row[1] == "17"
    assert "sent between ranks: nothing" in page


@pytest.mark.parametrize(
    ("order", "traced"), [((3, 4, 5, 2, 3, 4, 5, 6), (2, 3, 4)), ((4, 5, 3, 4, 5, 6, 7), (3, 4, 5))]
)
def test_a_run_that_goes_back_while_it_is_traced_is_traced_anew(tmp_path, order, traced):
    said: list[str] = []
    tracer = Tracer(Profile(from_step=4, steps=3), tmp_path, 0, CPU, said.append)
    weight = torch.ones(8, 8)
    for step in order:
        with tracer.update(step, lambda: 0.25):
            for _ in range(step):
                torch.mm(weight, weight)
    tracer.close()
    assert said == [f"Updates {traced[0]} to {traced[-1]} are traced: {tmp_path / 'rank-0.txt'}"]
    page = (tmp_path / "rank-0.txt").read_text()
    assert page.startswith("3 updates in ") and "waiting for data: 0.750 s" in page
    row = next(line.split() for line in page.splitlines() if line.startswith("aten::mm "))
    assert row[1] == str(sum(traced))


@pytest.mark.parametrize(("start", "updates"), [(4, 5), (0, 3)])
def test_a_run_that_does_not_reach_them_or_begins_behind_them_traces_nothing(tmp_path, start, updates):
    assert not any(trace(tmp_path, start=start, updates=updates, from_step=3, steps=2))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("done", "asked", "said"),
    [
        (0, Profile(from_step=3, steps=2), ""),  # the last two updates of four
        (2, Profile(from_step=3, steps=2), ""),
        (0, Profile(from_step=3), "updates 3 to 5 are asked for, and the run ends after update 4"),
        (0, Profile(from_step=30), "updates 30 to 32 are asked for, and the run ends after update 4"),
        (3, Profile(from_step=3, steps=1), "the run is past update 3 already"),
    ],
)
def test_a_trace_that_will_not_be_is_told_of(done: int, asked: Profile, said: str) -> None:
    told = asked.missed(done=done, total=4)
    assert told == (said and f"monitor.profile: nothing is traced: {said}")


def test_a_folder_that_cannot_be_written_is_told_of_and_training_goes_on(tmp_path):
    (tmp_path / "profile").write_text("not a folder")
    [said] = trace(tmp_path / "profile", updates=4, from_step=2, steps=1)
    assert said.startswith("The profile could not be written (")


def test_times_together_are_counted_once():
    assert union([(5, 7), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 7)]
    assert total(union([(0, 2), (1, 3)])) == 3


def test_what_is_sent_is_hidden_where_operators_run_beside_it():
    events = [event("gloo:all_reduce", 10, 20), event("aten::mm", 0, 14), event("c10d::allreduce_", 0, 1)]
    assert overlap(events) == (10, 4)
    kernels = [
        event("ncclDevKernel_ReduceScatter", 10, 20, device=True),
        event("gemm", 15, 30, device=True),
        event("aten::mm", 0, 100),  # the host's time hides nothing on a device
    ]
    assert overlap(kernels) == (10, 5)
    page = list(summary(kernels, updates=1, waited=0.0))  # type: ignore[arg-type]
    assert "sent between ranks: 0.000 s, of which 50.0% while this rank computed" in page
    assert "device busy: 0.000 s, 20.0%" in page
