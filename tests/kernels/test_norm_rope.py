"""Norm and rotation by head, however heads are shared among programs; the op suite checks the op itself."""

from __future__ import annotations

import numpy as np
import pytest

from genesis.array import Array, from_numpy
from genesis.kernels.norm import rope as kernels
from genesis.kernels.norm.rope import Tiles, backward_tiles, forward_tiles
from genesis.op import registry
from tests.ops.devices import CUDA, moved, using

BATCH, TOKENS, HEADS, KEY_HEADS, VALUES, SIZE = 2, 5, 5, 2, 3, 8
ATTRS = {"heads": HEADS, "key_heads": KEY_HEADS}
# Each term of the longest sum, that of a weight's gradient, may round once on either side.
TOLERANCE = 2 * BATCH * TOKENS * (HEADS + KEY_HEADS) * 2.0**-24


def inputs() -> list[Array]:
    """g, x, both weights, cos and sin on the current device."""
    rng = np.random.default_rng(1)
    whole, half = (BATCH, TOKENS, HEADS + KEY_HEADS + VALUES, SIZE), (TOKENS, SIZE // 2)
    shapes = (whole, whole, (SIZE,), (SIZE,), half, half)
    return [moved(from_numpy(rng.standard_normal(shape, np.float32))) for shape in shapes]


@pytest.mark.sample(cases=2)
@pytest.mark.parametrize("tiles", [Tiles(8, 1, 1, 1), Tiles(8, 1, 1, 12), Tiles(64, 4, 3, 3), Tiles(8, 1, 2, 1000)])
def test_heads_may_be_shared_among_any_number_of_programs(tiles: Tiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA implementations themselves are called: an op called before would repeat its launches."""
    monkeypatch.setattr(kernels, "forward_tiles", lambda _: tiles)
    monkeypatch.setattr(kernels, "backward_tiles", lambda _: tiles)
    g, *rest = inputs()
    y, rstd = registry["norm_rope"](*rest, **ATTRS, eps=1e-6)
    wanted = [y, rstd, *registry["norm_rope_backward"](g, *rest, rstd, **ATTRS)]
    with using(CUDA):
        found = [moved(from_numpy(np.full(a.shape, np.nan, np.float32))) for a in wanted]
        g, *rest = inputs()
    kernels.norm_rope((found[0], found[1]), *rest, **ATTRS, eps=1e-6)
    kernels.norm_rope_backward((found[2], found[3], found[4]), g, *rest, found[1], **ATTRS)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=TOLERANCE, atol=TOLERANCE)


def test_few_tokens_go_to_smaller_programs() -> None:
    few, many = 128 * 64, 8192 * 64
    assert forward_tiles(few).pairs < forward_tiles(many).pairs
    assert backward_tiles(few).pairs < backward_tiles(many).pairs
