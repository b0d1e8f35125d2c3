"""Reducing by tiles: every split of every shape gives what numpy gives, and rounding grows slowly."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from genesis.backend import cpu
from genesis.ops import blocks as module
from genesis.ops.blocks import arrange, reduce_into, reduce_tiles, store_kept

SHAPES = ((7,), (1, 9), (5, 6), (6, 1, 5), (3, 4, 5), (2, 5, 3, 4), (40, 3), (3, 40), (2, 40, 5))


@pytest.fixture
def tiny_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that every boundary occurs in small arrays."""
    monkeypatch.setattr(module, "_TILE", 12)
    monkeypatch.setattr(module, "_BLOCK", 4)
    monkeypatch.setattr(module, "_NARROW", 3)


def axes_of(ndim: int) -> list[tuple[int, ...]]:
    return [axes for r in range(ndim + 1) for axes in itertools.combinations(range(ndim), r)]


def layouts(x: np.ndarray) -> list[np.ndarray]:
    """Row-major, column-major, with a step, repeated."""
    return [x, np.asfortranarray(x), np.repeat(x, 2, axis=0)[::2], np.broadcast_to(x[:1], x.shape)]


@pytest.mark.usefixtures("tiny_tiles")
@pytest.mark.parametrize("shape", SHAPES)
def test_every_tiling_sums_and_compares_exactly(shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).integers(-50, 50, shape)
    for x, axes in itertools.product(layouts(values), axes_of(len(shape))):
        for ufunc in (np.add, np.maximum, np.minimum):
            want = ufunc.reduce(x, axis=axes)
            got = np.full(want.shape, -999)
            reduce_into(ufunc, x, axes, got, np.dtype(np.int64))
            np.testing.assert_array_equal(got, want, err_msg=f"{ufunc} {shape} {x.strides} over {axes}")


@pytest.mark.usefixtures("tiny_tiles")
@pytest.mark.parametrize("shape", SHAPES)
def test_prepared_tiles_meet_their_own_rows_and_columns(shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(1).integers(-50, 50, shape)
    for x, axes in itertools.product(layouts(values), axes_of(len(shape))):
        top = x.max(axis=axes, keepdims=True)
        want = (x - top).sum(axis=axes)
        flat, kept = arrange(x, axes)
        best = reduce_tiles(np.maximum, flat, flat.dtype)
        got = np.full(want.shape, -999)
        store_kept(
            reduce_tiles(np.add, flat, flat.dtype, lambda tile, a, c, best=best: tile - best[a, None, c]), kept, got
        )
        np.testing.assert_array_equal(got, want, err_msg=f"{shape} {x.strides} over {axes}")


@pytest.mark.parametrize(
    ("shape", "axis", "depth"), [((1 << 20,), 0, 45), ((1 << 17, 20), 0, 300), ((1 << 17, 2), 0, 45)]
)
def test_rounding_of_float32_sums_grows_with_the_depth_of_the_tree(
    shape: tuple[int, ...], axis: int, depth: int
) -> None:
    x = np.full(shape, 0.1, np.float32)
    got = np.empty(shape[1:], np.float32)
    reduce_into(np.add, x, (axis,), got, np.dtype(np.float32))
    exact = float(np.float32(0.1)) * shape[0]
    assert float(np.abs(got - exact).max()) <= depth * 2.0**-24 * exact
    one_after_another = float(np.cumsum(x.reshape(shape[0], -1)[:, 0], dtype=np.float32)[-1])
    assert abs(one_after_another - exact) > depth * 2.0**-24 * exact  # the bound tells the two apart


@pytest.mark.parametrize(
    ("shape", "axes"), [((3_000_001,), (0,)), ((1500, 1100), (0,)), ((1500, 1100), (1,)), ((300_000, 5), (0,))]
)
def test_the_number_of_threads_changes_no_bit(shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    x = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    before = cpu._workers.count
    results = []
    try:
        for count in (1, 2, 5):
            cpu.set_threads(count)
            got = np.empty([s for i, s in enumerate(shape) if i not in axes], np.float32)
            reduce_into(np.add, x, axes, got, np.dtype(np.float32))
            results.append(got.tobytes())
    finally:
        cpu.set_threads(before)
    assert len(set(results)) == 1


def test_two_byte_floats_are_widened_before_they_meet() -> None:
    x = np.full((4096, 33), 1.0, np.float16)
    got = np.empty(33, np.float32)
    reduce_into(np.add, x, (0,), got, np.dtype(np.float32))
    assert (got == 4096).all()
    assert math.isclose(float(x.sum(axis=0, dtype=np.float16)[0]), 2048)  # where float16 itself stops counting
