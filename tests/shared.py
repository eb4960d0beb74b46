"""Where tests find real data that is too large, or not free enough, to live in the project."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def shared(name: str) -> Path:
    """The file of that name: below DANLU_DATA, else below ../shared/data; where neither is, the test skips and says so.

    In CI a missing file is a failure: there the data is always laid beside the checkout.
    """
    folders = [Path(os.environ["DANLU_DATA"])] if "DANLU_DATA" in os.environ else [ROOT.parent / "shared" / "data"]
    for folder in folders:
        if (folder / name).exists():
            return folder / name
    reason = f"no {name}: set DANLU_DATA to the folder that holds it"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
