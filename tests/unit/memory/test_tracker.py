"""Bytes that tensors really held: counted by hand, and by torch's own tool for it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from danlu.memory.tracker import Tracker


def test_the_peak_is_what_was_alive_at_once() -> None:
    with Tracker() as tracker:
        a = torch.zeros(1000)  # 4,000 bytes
        b = a + 1
        view = b[10:].view(-1, 10)  # of b's memory
        del b
        assert tracker.live == 8000
        del view
        assert tracker.live == 4000
        a.add_(1)
    assert tracker.live == 4000 and tracker.peak == 8000


def test_what_was_there_before_counts_once_it_is_told_of() -> None:
    weight, other = torch.zeros(100), torch.zeros(50)
    with Tracker() as tracker:
        tracker.hold("weights", [weight, weight.view(10, 10)])
        made = weight * 2
        tracker.hold("copies", [made])
        other * 2
        del made
    assert tracker.parts() == {"weights": 400, "copies": 400, "forward": 200}
    assert [piece.bytes for piece in tracker.pieces()] == [400, 400, 200]


def test_a_memory_that_is_made_smaller_or_larger_is_followed() -> None:
    with Tracker() as tracker:
        made = torch.zeros(100)
        made.untyped_storage().resize_(0)
        made.view(torch.int32)  # a change is seen when the tensor is next used
        assert tracker.live == 0
        made.untyped_storage().resize_(800)
        torch.zeros(1)  # and from then on at once
        assert tracker.live == 800


def test_parts_tell_forward_backward_and_modules_apart() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    given = torch.ones(32, 8)
    with Tracker() as tracker, tracker.within({"first": model[0]}), tracker.gradients(model.parameters()):
        tracker.hold("weights", model.parameters())
        hidden = model[0](given)
        loss = model[2](model[1](hidden)).sum()
        loss.backward()
    parts = tracker.parts()
    assert parts["first"] == 32 * 16 * 4
    assert {"forward", "backward"} <= parts.keys()
    assert {piece.part for piece in tracker._pieces} >= {"weights", "gradients"}
    assert tracker.live == hidden.nbytes + loss.nbytes + 2 * sum(p.nbytes for p in model.parameters())
    assert not model[0]._forward_hooks and not model[0]._forward_pre_hooks


@pytest.mark.parametrize("width", [16, 64])
def test_torchs_own_tool_finds_the_same_peak(width: int) -> None:
    def update(tracker: Tracker | MemTracker) -> None:
        model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.LayerNorm(width))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        model(torch.ones(100, width)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with Tracker() as ours:
        update(ours)
    with MemTracker() as theirs:
        update(theirs)
    found = theirs.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert ours.peak == found
