"""What tests of kernels run under, beside what all tests do."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def wide_tiles() -> None:
    """Tiles are those of a GPU."""
