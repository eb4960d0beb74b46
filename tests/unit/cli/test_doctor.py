"""`danlu doctor`."""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import threading
import time

import psutil
import torch

from danlu.cli import doctor


def run(folder, capsys) -> tuple[int, str]:
    parser = argparse.ArgumentParser()
    doctor.add(parser.add_subparsers())
    arguments = parser.parse_args(["doctor", "--folder", str(folder)])
    code = arguments.run(arguments)
    return code, capsys.readouterr().out


def test_it_says_what_is_here_and_nothing_secret_and_leaves_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "processes", lambda: iter([(True, "two processes", "stand-ins, tried below")]))
    monkeypatch.setenv("HF_TOKEN", "hf_planted0123456789canary")
    code, said = run(tmp_path / "new" / "runs", capsys)
    assert code == 0, said
    assert said.endswith("all is well\n")
    assert torch.__version__ in said
    assert "GFLOP/s measured" in said
    assert "stand-ins" in said
    assert "planted" not in said
    assert "\x1b" not in said
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_found(tmp_path, capsys, monkeypatch):
    (tmp_path / "runs").write_text("a file")
    monkeypatch.setattr(doctor, "processes", lambda: iter(()))
    monkeypatch.setattr(doctor, "speed", lambda: iter(()))
    code, said = run(tmp_path / "runs", capsys)
    assert code == 1
    assert "FAIL writable" in said
    assert "give --folder" in said


def test_a_check_that_breaks_is_a_finding(tmp_path, capsys, monkeypatch):
    def broken():
        yield None, "first", "fine"
        raise RuntimeError("driver fell over")

    for name in ("versions", "speed", "processes", "extras"):
        monkeypatch.setattr(doctor, name, lambda: iter(()))
    monkeypatch.setattr(doctor, "devices", broken)
    code, said = run(tmp_path, capsys)
    assert code == 1
    assert "RuntimeError: driver fell over" in said


def test_two_processes_that_cannot_meet_are_found(monkeypatch):
    monkeypatch.setattr(doctor, "PAIR", "import sys; sys.exit('no network device')")
    (first, *_) = doctor.processes()
    assert first[0] is False
    assert "no network device" in first[2]


def test_nothing_it_starts_listens_for_other_machines():
    # PB-096
    heard: set[str] = set()
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    heard.update(c.laddr.ip for c in child.net_connections("inet") if c.status == psutil.CONN_LISTEN)
            time.sleep(0.01)

    thread = threading.Thread(target=watch)
    thread.start()
    found = list(doctor.processes())
    done.set()
    thread.join()
    assert [good for good, _, _ in found] == [True, True], found
    assert "they meet on the loopback device" in found[0][2]
    assert heard  # or the test has seen nothing
    assert heard <= {"127.0.0.1", "::1"}


def test_torch_is_not_loaded_to_name_the_verb():
    program = (
        "import argparse, sys; from danlu.cli import doctor; doctor.add(argparse.ArgumentParser().add_subparsers());"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
