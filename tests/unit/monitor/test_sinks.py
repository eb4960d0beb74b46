"""A tracker that fails or hangs never stops or slows a step (PB-102)."""

from __future__ import annotations

import threading
import time

import pytest

from danlu.monitor.sinks import Curve, Evaluated, Latest, Queue


class Recorder:
    """Takes messages, and does something first."""

    def __init__(self, before=lambda number: None):
        self.taken: list[object] = []
        self.closed = False
        self._before = before

    def take(self, message):
        self._before(len(self.taken) + 1)
        self.taken.append(message)

    def close(self):
        self.closed = True


def messages(count: int) -> list[Evaluated]:
    return [Evaluated(step, count, 1.0, False) for step in range(1, count + 1)]


def test_all_is_taken_in_order_and_closed():
    sink, said = Recorder(), []
    queue = Queue("test", lambda: sink, warn=said.append)
    sent = messages(500)
    for message in sent:
        queue.put(message)
    queue.close()
    assert sink.taken == sent
    assert sink.closed
    assert said == []


def test_one_that_raises_at_the_third_call_is_dropped_with_one_warning():
    def third(number: int) -> None:
        if number == 3:
            raise ConnectionError("tracker is away\nand more lines")

    sink, said = Recorder(third), []
    queue = Queue("tracker", lambda: sink, warn=said.append)
    for message in messages(200):
        queue.put(message)
        time.sleep(0.0005)
    queue.close()
    assert len(sink.taken) == 2
    (warning,) = said
    assert warning.startswith("tracker failed")
    assert "ConnectionError: tracker is away)" in warning


def test_one_that_cannot_even_be_made_is_dropped_with_one_warning():
    said: list[str] = []

    def build():
        raise ImportError("no module named tracker")

    queue = Queue("tracker", build, warn=said.append)
    for message in messages(50):
        queue.put(message)
    queue.close()
    assert len(said) == 1
    assert "no module named tracker" in said[0]


def test_one_that_blocks_slows_no_step_and_is_left_behind_with_one_warning():
    hang = threading.Event()
    sink, said = Recorder(lambda number: hang.wait(60) and None), []
    queue = Queue("tracker", lambda: sink, warn=said.append, bound=16)
    slowest = 0.0
    for message in messages(2000):
        start = time.thread_time()  # of this thread alone: others use the machine too
        queue.put(message)
        slowest = max(slowest, time.thread_time() - start)
    start = time.monotonic()
    queue.close(timeout=0.3)
    assert time.monotonic() - start < 5
    hang.set()
    assert slowest < 0.02
    assert queue.lost > 1900
    assert len(said) == 1
    assert "keep up" in said[0]


def test_one_that_hangs_at_the_end_is_left_behind():
    hang = threading.Event()
    sink, said = Recorder(lambda number: hang.wait(60) and None), []
    queue = Queue("tracker", lambda: sink, warn=said.append)
    queue.put(messages(1)[0])
    start = time.monotonic()
    queue.close(timeout=0.2)
    assert time.monotonic() - start < 5
    hang.set()
    assert len(said) == 1
    assert "left behind" in said[0]


def curve(number: int) -> Curve:
    return Curve(train=((number, 1.0),), evaluation=(), learning_rate=())


def test_of_pictures_only_the_newest_waits_and_the_last_is_always_drawn():
    begun, go = threading.Event(), threading.Event()

    def slow(number: int) -> None:
        begun.set()
        assert go.wait(20)

    sink = Recorder(slow)
    latest = Latest("picture", lambda: sink, warn=pytest.fail, clock=time.monotonic, share=1.0)
    latest.put(curve(1))
    assert begun.wait(20)
    for number in range(2, 40):
        latest.put(curve(number))
    go.set()
    latest.close()
    assert sink.taken == [curve(1), curve(39)]
    assert sink.closed


def test_drawing_takes_a_bounded_share_of_the_time():
    sink = Recorder(lambda number: time.sleep(0.05))
    latest = Latest("picture", lambda: sink, warn=pytest.fail, clock=time.monotonic, share=0.05)
    begun = time.monotonic()
    number = 0
    while time.monotonic() - begun < 0.8:
        number += 1
        latest.put(curve(number))
        time.sleep(0.005)
    assert len(sink.taken) <= 2  # one at once, the next only after 20 times as long
    latest.close()
    assert sink.taken[-1] == curve(number)


def test_a_picture_that_fails_is_said_once():
    said: list[str] = []

    def fail(number: int) -> None:
        raise OSError("read-only file system")

    latest = Latest("loss.png", lambda: Recorder(fail), warn=said.append, clock=time.monotonic)
    for number in range(5):
        latest.put(curve(number))
    latest.close()
    assert len(said) == 1
    assert "loss.png" in said[0]
