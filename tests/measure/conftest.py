"""Limits that are measured quickly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.measure.quick import small_limits


@pytest.fixture
def quick_limits() -> Iterator[None]:
    with small_limits():
        yield
