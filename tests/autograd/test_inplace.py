"""In-place changes and views: torch's results for the scenarios, and the refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genesis
from genesis.errors import GradientError
from tests.autograd.scenarios import SCENARIOS

EXPECTED: dict[str, list[Any]] = json.loads((Path(__file__).parent / "fixtures" / "inplace.json").read_text())


def test_every_scenario_has_expected_values() -> None:
    assert list(SCENARIOS) == list(EXPECTED)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str) -> None:
    got = SCENARIOS[name](genesis)
    assert len(got) == len(EXPECTED[name])
    for i, (value, expected) in enumerate(zip(got, EXPECTED[name], strict=True)):
        if isinstance(expected, bool) or expected is None:
            assert value is expected, f"item {i}"
        else:
            np.testing.assert_allclose(value.detach().numpy(), expected, rtol=1e-12, err_msg=f"item {i}")
