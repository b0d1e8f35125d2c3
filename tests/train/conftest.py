"""What the tests of whole runs share: one warm process for all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.train.runs import Forks


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Started at its first use; tests that use it are in one xdist group, so that there is one."""
    with Forks() as forks:
        yield forks
