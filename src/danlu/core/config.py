"""Settings: typed dataclasses from YAML, overridden and saved; every mistake named with its line."""

from __future__ import annotations

from dataclasses import MISSING, field
from typing import Any


def setting(
    default: Any = MISSING,
    doc: str = "",
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> Any:
    """A field of a settings dataclass: its default (none: it must be given), its one-line doc, and its bounds."""
    facts = {"doc": doc, "at_least": at_least, "above": above, "at_most": at_most, "below": below}
    if isinstance(default, (list, dict)) or (callable(default) and not isinstance(default, type)):
        return field(default_factory=default if callable(default) else lambda: type(default)(default), metadata=facts)
    if default is MISSING:
        return field(metadata=facts)
    return field(default=default, metadata=facts)
