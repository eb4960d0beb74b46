"""What a person sees, in a terminal and in a file."""

from __future__ import annotations

import io
import os
import pty
import re
import struct
import termios
import threading
from fcntl import ioctl

import pytest
from rich.console import Console as Screen
from rich.text import Text

from danlu.monitor.console import Plain, Terminal, facts, fit, open_console, size, span
from danlu.monitor.sinks import Evaluated, Point
from tests.unit.monitor.reports import Clock

COLOUR = re.compile(r"\x1b\[[0-9;]*(?<=[\[;])(3[0-8]|9[0-7])[;m]")


def point(step: int, **changes: object) -> Point:
    known: dict[str, object] = {
        "step": step,
        "total_steps": 300,
        "logged": True,
        "loss": 4.25,
        "losses": {"language": 4.25},
        "averaged": 1,
        "unsound": 0,
        "learning_rate": 9.3e-4,
        "norm": 0.8125,
        "tokens": 8192 * step,
        "tokens_per_second": 12903.4,
        "mfu": 0.234,
        "seconds_left": 42.0,
        "memory": None,
        "resident": 1_240_000_000,
        "use": 0.97,
        "watts": None,
        "data_wait": 0.004,
    }
    return Point(**(known | changes))  # type: ignore[arg-type]


def test_a_file_gets_plain_lines_without_control_codes():
    file, clock = io.StringIO(), Clock()
    console = open_console(file, clock=clock)
    assert isinstance(console, Plain)
    console.take(point(1))
    assert file.getvalue() == (
        "step 1/300  loss 4.2500  12,903 tokens/s  left 0:42  rate 0.00093  norm 0.812  MFU 23%  memory 1.24 GB  "
        "data wait 0%  busy 97%\n"
    )
    console.take(Evaluated(50, 300, 3.5, True))
    console.take(Evaluated(100, 300, 3.75, False))
    console.close()
    assert file.getvalue().splitlines()[1:] == [
        "step 50/300  evaluation loss 3.5000  (the best so far)",
        "step 100/300  evaluation loss 3.7500",
    ]
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", file.getvalue())


@pytest.mark.parametrize(("steps", "cost", "most"), [(20, 0.2, 4), (300, 0.35, 30), (10_000, 0.01, 30)])
def test_a_short_run_is_a_few_lines_with_the_first_and_the_last(steps, cost, most):
    # PB-111: under 40 lines for a short run, its other lines included
    file, clock = io.StringIO(), Clock()
    console = Plain(file, clock=clock)
    for step in range(1, steps + 1):
        clock.pass_by(cost)
        console.take(point(step, total_steps=steps))
    console.close()
    lines = file.getvalue().splitlines()
    assert 2 <= len(lines) <= most
    assert lines[0].startswith(f"step 1/{steps} ")
    assert lines[-1].startswith(f"step {steps}/{steps} ")


def test_a_long_run_says_something_every_minute():
    file, clock = io.StringIO(), Clock()
    console = Plain(file, clock=clock)
    for step in range(1, 8 * 3600 + 1):
        clock.pass_by(1.0)
        console.take(point(step, total_steps=10**6))
    console.close()
    assert 8 * 60 <= len(file.getvalue().splitlines()) <= 8 * 60 + 50


def test_the_last_step_is_said_also_when_the_run_ends_early():
    file, clock = io.StringIO(), Clock()
    console = Plain(file, clock=clock)
    for step in range(1, 8):
        console.take(point(step))
    console.close()
    assert file.getvalue().splitlines()[-1].startswith("step 7/300 ")


def test_a_mean_and_what_is_not_in_it_are_said():
    # PB-053
    file = io.StringIO()
    Plain(file, clock=Clock()).take(point(10, averaged=9, unsound=1))
    assert "loss 4.2500 (mean of 9 steps)  1 not finite, skipped" in file.getvalue()
    file = io.StringIO()
    Plain(file, clock=Clock()).take(point(10, loss=None, norm=None, averaged=0, unsound=1))
    assert "1 not finite, skipped" in file.getvalue()
    assert "loss" not in file.getvalue()


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 200])
def test_the_live_display_is_two_lines_at_every_width(width):
    file = io.StringIO()
    screen = Screen(file=file, width=width, force_terminal=True, color_system=None, legacy_windows=False)
    console = Terminal(screen, clock=Clock())
    console._point = point(120, seconds_left=3725.0)
    screen.print(console.render())
    lines = [Text.from_ansi(line).plain for line in file.getvalue().splitlines()]
    assert len(lines) == 2
    assert all(len(line) <= width for line in lines)
    assert lines[0].startswith("step 120/300")
    if width >= 40:
        assert "loss 4.2500" in lines[1]
    if width >= 80:
        assert "40%" in lines[0]
        assert "left 1:02:05" in lines[0]
    if width >= 120:
        assert "data wait 0%" in lines[1]


def in_a_terminal(monkeypatch, *, term: str = "xterm-256color", no_color: bool = False) -> str:
    """What a terminal of 100 columns receives in a short run."""
    monkeypatch.setenv("TERM", term)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    leader, follower = pty.openpty()
    ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    got = bytearray()

    def drain() -> None:
        try:
            while part := os.read(leader, 65536):
                got.extend(part)
        except OSError:
            pass

    reader = threading.Thread(target=drain)
    reader.start()
    with open(follower, "w", encoding="utf-8") as stream:
        clock = Clock()
        console = open_console(stream, clock=clock)
        for step in range(1, 301):
            clock.pass_by(0.1)
            console.take(point(step))
            if step == 150:
                console.take(Evaluated(150, 300, 3.5, True))
        console.close()
    reader.join(10)
    os.close(leader)
    return got.decode()


def test_a_terminal_gets_a_live_display_that_is_left_clean(monkeypatch):
    seen = in_a_terminal(monkeypatch)
    assert "\x1b[?25l" in seen  # the cursor is hidden
    assert seen.rindex("\x1b[?25h") > seen.rindex("\x1b[?25l")  # and shown again
    assert "evaluation loss 3.5000" in seen
    assert "step 300/300" in seen
    assert COLOUR.search(seen)


def test_no_color_is_honoured(monkeypatch):
    seen = in_a_terminal(monkeypatch, no_color=True)
    assert "step 300/300" in seen
    assert not COLOUR.search(seen)


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    seen = in_a_terminal(monkeypatch, term="dumb")
    assert "\x1b" not in seen
    lines = seen.splitlines()
    assert 5 < len(lines) < 25
    assert lines[0].startswith("step 1/300  loss 4.2500")


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.4, "0:00"), (42, "0:42"), (727, "12:07"), (11_100, "3:05:00"), (187_200, "2 d 4 h")],
)
def test_spans(seconds, said):
    assert span(seconds) == said


def test_words():
    assert size(812_400_000) == "812 MB"
    assert size(1_240_000_000) == "1.24 GB"
    assert fit(["loss 4.2", "rate 1", "norm 2"], 16) == "loss 4.2  rate 1"
    assert fit(["loss 4.2"], 3) == ""


def test_a_small_mfu_is_not_rounded_to_nothing():
    assert "MFU 0.4%" in facts(point(1, mfu=0.0042))
    assert "MFU 41%" in facts(point(1, mfu=0.4149))
