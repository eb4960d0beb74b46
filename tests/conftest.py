"""What every test may ask for."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tests.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes over gloo that live as long as the session; started when first used."""
    pool = Ranks()
    yield pool
    pool.close()


SLOW = ("tests/fault/", "tests/journey/", "tests/parity/test_tokenizers", "tests/unit/cli/test_doctor")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Folders of whole runs, and of libraries that take seconds to load, are left out of `make test-fast`."""
    for item in items:
        if item.nodeid.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
