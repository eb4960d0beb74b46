"""Freed memory is kept: a buffer that is asked for again is not cleared page by page by the kernel."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from danlu.core import heap

FAULTS = """
import ctypes, resource, sys
from danlu.core import heap
if sys.argv[1] == "keep":
    assert heap.keep()
c = ctypes.CDLL(None)
c.malloc.restype, c.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
c.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def touched():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    buffers = [c.malloc(24 * 2**20) for _ in range(4)]
    for buffer in buffers:
        c.memset(buffer, 1, 24 * 2**20)
    for buffer in buffers:
        c.free(buffer)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
touched()
print(min(touched() for _ in range(5)))
"""
PAGES = 4 * 24 * 2**20 // 4096  # of the four buffers


def faults(how: str) -> int:
    return int(subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="only glibc is told to keep memory")
def test_buffers_asked_for_again_are_there_already() -> None:
    assert faults("keep") < PAGES / 100
    if "[always]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():  # or pages are large
        assert faults("as it is") > PAGES / 2


def test_another_system_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not heap.keep()
