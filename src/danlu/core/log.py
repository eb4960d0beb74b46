"""One line per fact, from the right rank: shared lines once, errors with their rank."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("danlu")


def start(*, rank: int, size: int, verbose: bool = False) -> None:
    """Messages of rank 0 go to standard error as they are; other ranks speak only of warnings, and name themselves."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s" if size == 1 else f"[rank {rank}] %(message)s"))
    if rank == 0:
        handler.setFormatter(logging.Formatter("%(message)s"))
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(logging.DEBUG if verbose else logging.INFO if rank == 0 else logging.WARNING)
