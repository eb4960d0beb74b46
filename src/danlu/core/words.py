"""Bytes and seconds, in words."""

from __future__ import annotations


def size(number: float) -> str:
    """Bytes, in words."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "bytes" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def duration(number: float) -> str:
    """Seconds, in words."""
    if number < 90:
        return f"{number:.0f} seconds"
    if number < 5400:
        return f"{number / 60:.0f} minutes"
    return f"{number / 3600:.1f} hours" if number < 48 * 3600 else f"{number / 86400:.1f} days"
