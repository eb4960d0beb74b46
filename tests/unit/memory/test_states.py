"""States that are away: every update has the bits that it has with all states in place, and the memory is gone."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from danlu.core.errors import Unhealthy
from danlu.memory.places import File, Host, Place
from danlu.memory.states import StatesAway, portion
from danlu.memory.tracker import Tracker
from danlu.optim.adamw import AdamW
from danlu.optim.common import Common
from danlu.optim.layer import OptimLayer
from danlu.optim.lion import Lion
from danlu.optim.sgd import Sgd

SHAPES = [(300, 217), (217,), (3, 7, 5), (1,), (649, 33), (0, 4)]
BUCKET = 2**14

Make = Callable[[Sequence[dict[str, object]]], torch.optim.Optimizer]
KINDS: dict[str, Make] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "amsgrad": lambda groups: torch.optim.AdamW(groups, lr=1e-2, amsgrad=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-2, momentum=0.9),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
}


def weights() -> list[nn.Parameter]:
    torch.manual_seed(3)
    return [nn.Parameter(torch.randn(*shape)) for shape in SHAPES]


def groups(made: list[nn.Parameter]) -> list[dict[str, object]]:
    return [{"params": made[:2], "weight_decay": 0.1}, {"params": made[2:], "weight_decay": 0.0}]


def give_gradients(update: int, *models: list[nn.Parameter], empty: bool = True) -> None:
    """The same to each; the first two updates leave vectors out. empty: whether weights without numbers get one."""
    torch.manual_seed(update)
    for alike in zip(*models):
        gradient = torch.randn_like(alike[0])
        for weight in alike:
            without = (update < 3 and weight.dim() == 1) or not (empty or weight.numel())
            weight.grad = None if without else gradient.clone()


def place(kind: str, folder: Path) -> Place:
    return File(folder) if kind == "file" else Host(pin=False)


def away(optimizer: torch.optim.Optimizer, where: Place, *, elementwise: bool = False) -> StatesAway:
    return StatesAway(optimizer, where, elementwise=elementwise, move=lambda made, update: made.step(), bucket=BUCKET)


@pytest.mark.parametrize("where", ["file", "host"])
@pytest.mark.parametrize(
    ("kind", "elementwise"),
    [("adamw", True), ("adamw", False), ("amsgrad", True), ("rmsprop", True), ("adafactor", False)],
)
def test_updates_have_the_bits_of_states_in_place(tmp_path: Path, kind: str, elementwise: bool, where: str) -> None:
    plain, moved = weights(), weights()
    reference, optimizer = KINDS[kind](groups(plain)), KINDS[kind](groups(moved))
    states = away(optimizer, place(where, tmp_path), elementwise=elementwise)
    cut = [piece for bucket in states.buckets for piece in bucket]
    assert len(states.buckets) >= 3 and (len(cut) > len(SHAPES)) == elementwise
    for update in range(1, 7):
        give_gradients(update, plain, moved, empty=kind != "adafactor")  # torch's divides by their number
        reference.step()
        states.step(update)
        assert not optimizer.state, "states have stayed in memory"
        for one, other in zip(plain, moved):
            assert torch.equal(one, other)
            there, here = reference.state.get(one, {}), states.state(other)
            assert there.keys() == here.keys()
            assert all(torch.equal(there[key], here[key]) and there[key].shape == here[key].shape for key in there)
    assert [group["params"] for group in optimizer.param_groups] == [moved[:2], moved[2:]]


@pytest.mark.parametrize("kind", [AdamW(), Lion(), Sgd(nesterov=True)], ids=lambda kind: kind.kind)
@pytest.mark.parametrize("threads", [1, 2])
def test_slices_of_large_weights_have_the_bits_of_whole_ones(kind: Common, threads: int) -> None:
    """However kernels divide a weight among threads, and whatever they do with what is left at its end."""

    def layer() -> tuple[dict[str, nn.Parameter], OptimLayer]:
        torch.manual_seed(0)
        named = {str(shape): nn.Parameter(torch.randn(shape)) for shape in ((3001, 517), (70001,), (13,))}
        return named, OptimLayer(kind, named.items(), total=9)

    (plain, reference), (moved, optim) = layer(), layer()
    optim.states = StatesAway(
        optim.torch, Host(pin=False), elementwise=kind.elementwise, move=optim.carry, bucket=2**18
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for update in range(1, 4):
            for one, other in zip(plain.values(), moved.values()):
                one.grad = torch.randn_like(one)
                other.grad = one.grad.clone()
            reference.step(update)
            optim.step(update)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(plain[name], moved[name]) for name in plain)


@pytest.mark.parametrize("where", ["file", "host"])
def test_states_are_given_back_as_they_were(tmp_path: Path, where: str) -> None:
    plain, moved = weights(), weights()
    reference, optimizer = KINDS["adamw"](groups(plain)), KINDS["adamw"](groups(moved))
    states = away(optimizer, place(where, tmp_path), elementwise=True)
    for update in range(1, 7):
        give_gradients(update, plain, moved)
        reference.step()
        if update == 3:  # as another run would go on: from copies of the states
            kept = {weight: {kind: value.clone() for kind, value in states.state(weight).items()} for weight in moved}
            states.clear()
            assert not any(states.state(weight) for weight in moved)
            for weight, values in kept.items():
                for kind, value in values.items():
                    states.restore(weight, kind, value)
        states.step(update)
    assert all(torch.equal(one, other) for one, other in zip(plain, moved))


def test_what_was_given_out_stays_while_updates_follow(tmp_path: Path) -> None:
    made = weights()
    file = File(tmp_path)
    states = away(KINDS["adamw"](groups(made)), file, elementwise=True)
    for update in (3, 4):
        give_gradients(update, made)
        states.step(update)
    held = [states.state(weight) for weight in made]
    copies = [{kind: value.clone() for kind, value in kept.items()} for kept in held]
    for update in (5, 6):
        give_gradients(update, made)
        states.step(update)
    assert all(torch.equal(kept[kind], copy[kind]) for kept, copy in zip(held, copies) for kind in copy)
    end = file._end
    del held
    gc.collect()
    for update in (7, 8):
        give_gradients(update, made)
        states.step(update)
    assert file._end == end, "rooms that nobody looks at are used again"


def test_a_failed_write_ends_the_next_update_or_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = weights()
    file = File(tmp_path)
    states = away(KINDS["adamw"](groups(made)), file)
    give_gradients(3, made)
    states.step(3)
    states.settle()

    def fail(*_: object) -> None:
        raise file._failure(OSError(28, "No space left on device"))

    monkeypatch.setattr(file, "write", fail)
    give_gradients(4, made)
    with pytest.raises(Unhealthy, match="is full"):
        states.step(4)
        states.state(made[0])
    # Nothing waits for what will never come: a process that fails can end.
    ended = threading.Thread(target=lambda: (states._reader.shutdown(), states._writer.shutdown()), daemon=True)
    ended.start()
    ended.join(20)
    assert not ended.is_alive()


def test_weights_are_bucketed_in_order_and_wholly(tmp_path: Path) -> None:
    made = weights()
    for elementwise in (True, False):
        states = away(KINDS["adamw"](groups(made)), Host(pin=False), elementwise=elementwise)
        pieces = [piece for bucket in states.buckets for piece in bucket]
        for weight in made:
            spans = [(piece.start, piece.stop) for piece in pieces if piece.weight is weight]
            assert spans[0][0] == 0 and spans[-1][1] == weight.numel()
            assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))
        if elementwise:
            assert all(sum(piece.stop - piece.start for piece in bucket) <= BUCKET for bucket in states.buckets)


def test_portions_follow_the_size_of_the_model(tmp_path: Path) -> None:
    assert [portion(numbers) for numbers in (1000, 2**23, 81_000_000, 2**33)] == [2**18, 2**19, 5_062_500, 2**23]
    made = [nn.Parameter(torch.zeros(1000, 2000)) for _ in range(5)]
    states = StatesAway(torch.optim.AdamW(made), File(tmp_path), elementwise=True, move=lambda *_: None)
    sizes = [sum(piece.stop - piece.start for piece in bucket) for bucket in states.buckets]
    assert sum(sizes) == 10_000_000 and max(sizes) <= 625_000 + 4096 and len(sizes) >= 16
    assert all(piece.start % 4096 == 0 for bucket in states.buckets for piece in bucket)


def test_tensors_hold_three_buckets_in_an_update_and_nothing_after_it(tmp_path: Path) -> None:
    """Tracked tensor bytes: between updates weights and gradients are all there is."""
    bucket = 2**16  # numbers: half a MB of moments
    made = [nn.Parameter(torch.randn(256, 1024)) for _ in range(8)]
    optimizer = torch.optim.AdamW(made, fused=True)
    states = StatesAway(optimizer, File(tmp_path), elementwise=True, move=lambda one, update: one.step(), bucket=bucket)
    kept = sum(weight.numel() * 4 for weight in made)
    for update in range(1, 4):
        for weight in made:
            weight.grad = torch.ones_like(weight)
        with Tracker() as tracker:
            tracker.hold("weights", made)
            tracker.hold("gradients", [weight.grad for weight in made if weight.grad is not None])
            states.step(update)
            states.settle()
            gc.collect()
            assert tracker.live <= 2 * kept + 10_000
            assert tracker.peak <= 2 * kept + (4 if update == 1 else 3) * 8 * bucket + 20_000
            assert tracker.peak >= 2 * kept + 8 * bucket, "nothing was seen"
    assert 2 * kept == 32 * 8 * bucket, "in memory, moments would be 32 buckets"


RESIDENT = """
import ctypes, gc, sys, torch
from pathlib import Path
from danlu.memory.places import File
from danlu.memory.states import StatesAway

def resident():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free is given back to the system
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmRSS"))

torch.set_num_threads(1)
weights = [torch.nn.Parameter(torch.zeros(1024, 1024)) for _ in range(16)]
for weight in weights:
    weight.grad = torch.ones_like(weight)
optimizer = torch.optim.AdamW(weights, fused=True)
states = StatesAway(optimizer, File(Path(sys.argv[1])), elementwise=True, move=lambda o, u: o.step(), bucket=2**21)
begun = resident()
for update in range(2):
    states.step(update)
states.settle()
away = resident() - begun
for update in range(2):
    optimizer.step()
print(away, resident() - begun)
"""


def test_the_process_is_smaller_by_what_the_states_take(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", RESIDENT, str(tmp_path)], check=True, capture_output=True, text=True)
    away, beside = map(int, done.stdout.split())
    states = 16 * 2**20 * 8
    assert beside >= 0.95 * states
    assert away <= 0.1 * states, f"of {states} bytes {away} have stayed"
