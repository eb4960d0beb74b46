from __future__ import annotations

import threading

import pytest
import torch

from danlu.checkpoint import host, threads
from danlu.checkpoint.host import Copies


@pytest.fixture(autouse=True)
def three_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "count", lambda: 3)
    monkeypatch.setattr(host, "PIECE", 1000)


def tensors() -> dict[str, torch.Tensor]:
    """Larger and smaller than a piece, no elements, one, other types, not contiguous, a slice, with a gradient."""
    draw = torch.Generator().manual_seed(3)
    return {
        "large": torch.randn(70, 33, generator=draw),
        "half": torch.randn(999, generator=draw).bfloat16(),
        "none": torch.empty(0, 4),
        "one": torch.tensor(7.0),
        "across": torch.randn(40, 30, generator=draw).t(),
        "slice": torch.randn(100, 8, generator=draw)[13:57],
        "counts": torch.arange(1500),
        "weight": torch.nn.Parameter(torch.randn(300, generator=draw)),
    }


def test_copies_are_equal_and_apart_and_their_room_is_used_again() -> None:
    given, copies = tensors(), Copies()
    first = copies.of(given)
    assert all(torch.equal(first[name], tensor) for name, tensor in given.items())
    before = {name: tensor.detach().clone() for name, tensor in given.items()}
    places = {name: copy.data_ptr() for name, copy in first.items()}
    for tensor in given.values():
        tensor.detach().add_(1)
    assert all(torch.equal(first[name], tensor) for name, tensor in before.items())
    second = copies.of(given)
    assert all(torch.equal(second[name], tensor) for name, tensor in given.items())
    assert {name: copy.data_ptr() for name, copy in second.items()} == places
    other = copies.of({"large": torch.ones(2), "new": torch.ones(3)})
    assert other.keys() == {"large", "new"} and other["large"].tolist() == [1, 1]


def test_room_that_is_still_being_made_ready_is_not_written_over_later() -> None:
    given, copies = {"w": torch.randn(1 << 20)}, Copies()
    copies.reserve(given)
    kept = copies.of(given)["w"]
    assert not any(thread.name == "danlu room" for thread in threading.enumerate())
    assert torch.equal(kept, given["w"])
    copies.reserve(given)
    place = copies._kept["w"].data_ptr()
    assert copies.of(given)["w"].data_ptr() == place == kept.data_ptr()


def test_shares_are_even_keep_their_order_and_raise_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [5, 1, 1, 9, 2, 3, 1]
    shares = list(threads.in_shares(lambda share: share, range(7), size=sizes.__getitem__))
    assert sorted(number for share in shares for number in share) == list(range(7))
    assert sorted(sum(sizes[number] for number in share) for share in shares) == [6, 7, 9]
    assert all(share == sorted(share) for share in shares)
    assert list(threads.in_shares(len, [], size=len)) == []
    with pytest.raises(ValueError, match="no"):
        threads.in_shares(lambda share: int("no"), [1, 2, 3], size=lambda n: n)
