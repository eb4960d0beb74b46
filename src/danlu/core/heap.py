"""What becomes of host memory that is given back: the C library keeps it for the next tensor.

An update frees and asks for the same buffers over and over. As it is, glibc hands the top of its heap back to the
system each time, and has it mapped again, so that the kernel clears the same pages anew at each update.
"""

from __future__ import annotations

import ctypes
import sys

# mallopt(3): freed memory above which the top of the heap is given back; what the heap grows by, beyond what is asked;
# and from how many bytes an allocation is mapped by itself, and given back by itself: glibc takes no more than this.
# (With none mapped so, buffers of hundreds of megabytes would be kept too. But each is asked for with an alignment, so
# that its freed place may be a few bytes short for the next, up to seven times before it is used again: LOG.md.)
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_NEVER, _GROWTH, _MAPPED = -1, 16 * 2**20, 32 * 2**20


def keep() -> bool:
    """Freed memory stays with the process, for the next tensor. Whether that could be arranged (glibc)."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    knobs = ((_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _GROWTH), (_MMAP_THRESHOLD, _MAPPED))
    return all(mallopt(*knob) == 1 for knob in knobs)
