"""What attention on CUDA refuses: heads larger than its tiles."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import genesis
from genesis.errors import ShapeError
from genesis.op import registry


@pytest.mark.parametrize("size", [257, 320])
def test_a_head_that_is_too_large_is_an_error_that_says_so(size: int) -> None:
    x = genesis.zeros(1, 2, 1, size, device="cuda").array
    with pytest.raises(ShapeError, match=rf"\b{size}\b.*\b256\b"):
        registry["attention"](x, x, x, scale=1.0)
