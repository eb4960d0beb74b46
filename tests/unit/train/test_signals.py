"""Signals: at once while starting, remembered on the way, twice at once, deaf in the end; put back afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from danlu.core.errors import Interrupted
from danlu.train import signals
from danlu.train.signals import STOPS, Told, listening


@pytest.mark.parametrize("number", STOPS)
def test_while_starting_it_ends_at_once_and_handlers_are_put_back(number: int) -> None:
    before = [signal.getsignal(each) for each in STOPS]
    with pytest.raises(Interrupted, match=f"stopped by {signal.Signals(number).name} while starting"), listening():
        os.kill(os.getpid(), number)
    assert [signal.getsignal(each) for each in STOPS] == before


def test_a_process_of_ours_says_so_and_ends_whatever_it_was_doing() -> None:
    script = (
        "import os, time\nfrom danlu.train.signals import listening\n"
        "with listening(owner=True) as told:\n told.name = '[rank 1] '\n"
        " try: os.kill(os.getpid(), 15); time.sleep(1)\n except BaseException: print('swallowed')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (75, "")
    assert (
        done.stderr == "[rank 1] stopped by SIGTERM while starting, before any update; the same command begins again\n"
    )


def test_on_the_way_it_is_remembered() -> None:
    with listening() as told:
        told.wait_for_step()
        assert not told
        os.kill(os.getpid(), signal.SIGUSR1)
        assert told and told.by == "SIGUSR1"


def test_ranks_take_two_signals_of_the_same_second_for_one() -> None:
    with listening() as told:
        told.wait_for_step()
        told.ranks = True
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert told.by == "SIGTERM"


def test_when_all_is_saved_nothing_more_is_heard() -> None:
    with listening() as told:
        told.wait_for_step()
        told.stop_listening()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert not told


@pytest.mark.parametrize(
    ("ranks", "launched", "pause", "code"),
    [
        (False, False, 0.15, -15),
        (False, False, 0.0, 0),  # `timeout` sends one signal twice
        (True, False, 0.0, 0),
        (True, False, 1.2, -15),
        (True, True, 1.2, 0),  # the launcher decides
    ],
)
def test_a_second_signal_ends_the_process_by_the_systems_own_rule(
    ranks: bool, launched: bool, pause: float, code: int
) -> None:
    script = (
        "import os, time\nfrom danlu.train.signals import listening\n"
        f"with listening() as told:\n told.wait_for_step(); told.ranks, told.launched = {ranks}, {launched}\n"
        f" os.kill(os.getpid(), 15); time.sleep({pause}); os.kill(os.getpid(), 15)\n"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == code


def test_a_hang_up_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with listening() as told:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not told
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_the_main_thread_nothing_is_changed() -> None:
    heard: list[Told] = []

    def work() -> None:
        with listening() as told:
            heard.append(told)

    before = [signal.getsignal(each) for each in STOPS]
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [signal.getsignal(each) for each in STOPS] == before and not heard[0]


def test_a_rank_whose_launcher_is_gone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    monkeypatch.setattr(signals.os, "getppid", lambda: 1)
    assert not told  # a process that stands alone may well outlive its parent
    told.ranks = True
    assert told and told.by == "the end of its launcher"
