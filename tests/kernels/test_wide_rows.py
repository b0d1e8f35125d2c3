"""Matmuls of 33 to 512 rows against numpy: all epilogues, sizes that no tile divides, tiles; and a row's bits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from genesis.array import Array, empty
from genesis.autograd.modes import no_grad
from genesis.backend import Device, backend_for
from genesis.dtypes import DType, bfloat16, float16, float32
from genesis.kernels.decode.wide_rows import (
    SHARED,
    VOCABULARY,
    WIDE_ROWS,
    WideTile,
    choose_tile,
    is_for_wide_rows,
    wide_rows_linear_into,
    wide_rows_swiglu_into,
)

CUDA = Device("cuda", 0)
STEP = {bfloat16: 2.0**-8, float16: 2.0**-11}


def on_gpu(values: np.ndarray, dtype: DType) -> Array:
    array = empty(values.shape, dtype, CUDA)
    backend_for(CUDA).from_numpy(np.ascontiguousarray(values), array)
    return array


def wide(x: Array) -> np.ndarray:
    return x.numpy().astype(np.float64)


@pytest.mark.sample(cases=4)
@pytest.mark.parametrize("dtype", [bfloat16, float16])
@pytest.mark.parametrize(("with_bias", "with_residual"), [*itertools.product((False, True), repeat=2)])
def test_epilogues(dtype: DType, with_bias: bool, with_residual: bool) -> None:
    """The product is rounded before the residual is added; memory held NaN."""
    m, n, k = 70, 88, 136
    rng = np.random.default_rng(1)
    x, w = on_gpu(rng.normal(size=(m, k)), dtype), on_gpu(rng.normal(size=(n, k)) / np.sqrt(k), dtype)
    bias, residual = on_gpu(rng.normal(size=n), dtype), on_gpu(rng.normal(size=(m, n)), dtype)
    out = on_gpu(np.full((m, n), np.nan), dtype)
    wide_rows_linear_into(out, x, [w], [bias] if with_bias else [], residual if with_residual else None)
    product = wide(x) @ wide(w).T + with_bias * wide(bias)
    if with_residual:
        rounded = wide(on_gpu(product, dtype))
        np.testing.assert_allclose(wide(out), rounded + wide(residual), rtol=2 * STEP[dtype], atol=STEP[dtype])
        exact = wide(out) == wide(on_gpu(rounded + wide(residual), dtype))
        assert exact.mean() > 0.99  # all but where float32 and float64 round the product differently
    else:
        np.testing.assert_allclose(wide(out), product, rtol=STEP[dtype], atol=1e-5)


def test_several_weights() -> None:
    rng, k = np.random.default_rng(2), 64
    x = on_gpu(rng.normal(size=(3, 20, k)), bfloat16)
    weights = [on_gpu(rng.normal(size=(n, k)) / 8, bfloat16) for n in (40, 8)]
    biases = [on_gpu(rng.normal(size=w.shape[0]), bfloat16) for w in weights]
    out = on_gpu(np.full((3, 20, 48), np.nan), bfloat16)
    wide_rows_linear_into(out, x, weights, biases)
    want = np.concatenate([wide(x) @ wide(w).T + wide(b) for w, b in zip(weights, biases, strict=True)], -1)
    np.testing.assert_allclose(wide(out), want, rtol=2.0**-8, atol=1e-5)


@pytest.mark.parametrize("splits", [2, 4])
def test_programs_share_a_long_k(splits: int) -> None:
    """The last program of a tile adds the parts in order, so results repeat; one part may be empty."""
    m, n, k = 70, 88, 136
    rng = np.random.default_rng(4)
    x, w = on_gpu(rng.normal(size=(m, k)), bfloat16), on_gpu(rng.normal(size=(n, k)) / np.sqrt(k), bfloat16)
    bias, residual = on_gpu(rng.normal(size=n), bfloat16), on_gpu(rng.normal(size=(m, n)), bfloat16)
    found = []
    for _ in range(2):
        out = on_gpu(np.full((m, n), np.nan), bfloat16)
        wide_rows_linear_into(out, x, [w], [bias], residual, WideTile(64, 32, 16, 4, 2, splits))
        found.append(wide(out))
    np.testing.assert_array_equal(*found)
    rounded = wide(on_gpu(wide(x) @ wide(w).T + wide(bias), bfloat16))
    np.testing.assert_allclose(found[0], rounded + wide(residual), rtol=2.0**-7, atol=2.0**-8)


@pytest.mark.parametrize("tile", [None, WideTile(64, 16, 32, 4, 2), WideTile(16, 32, 16, 4, 2)])
def test_swiglu(tile: WideTile | None) -> None:
    """h is computed from gate and up as they are stored."""
    m, f, k = 70, 72, 40
    rng = np.random.default_rng(3)
    x, w = on_gpu(rng.normal(size=(m, k)), bfloat16), on_gpu(rng.normal(size=(2 * f, k)) / np.sqrt(k), bfloat16)
    h, gate_up = (on_gpu(np.full((m, n), np.nan), bfloat16) for n in (f, 2 * f))
    wide_rows_swiglu_into(h, gate_up, x, w, tile)
    np.testing.assert_allclose(wide(gate_up), wide(x) @ wide(w).T, rtol=2.0**-8, atol=1e-5)
    g, u = np.split(wide(gate_up), 2, -1)
    np.testing.assert_allclose(wide(h), g / (1 + np.exp(-g)) * u, rtol=1.01 * 2.0**-8, atol=1e-6)
    without, unwritten = (on_gpu(np.full((m, n), np.nan), bfloat16) for n in (f, 2 * f))
    with no_grad():
        wide_rows_swiglu_into(without, unwritten, x, w, tile)
    np.testing.assert_array_equal(wide(without), wide(h))
    assert np.isnan(wide(unwritten)).all()


def test_what_it_takes() -> None:
    def taken(rows: int, dtype: DType = bfloat16, k: int = 64, step: int = 1, n: int = 24) -> bool:
        x, w = empty((rows, k), dtype, CUDA), empty((n, k), dtype, CUDA)
        with no_grad():
            return is_for_wide_rows(x, w.view((n, k), (k, step)) if step > 1 else w)

    assert taken(33) and taken(WIDE_ROWS, float16)
    assert not taken(32) and not taken(WIDE_ROWS + 1)
    assert not taken(64, float32) and not taken(64, k=60) and not taken(64, n=VOCABULARY)
    x = empty((64, 64), bfloat16, CUDA)
    assert not is_for_wide_rows(x, x)  # training


def test_tiles_fill_the_gpu() -> None:
    """Every choice fits on an SM, and small matmuls have many programs."""
    for m, (n, k, parts) in itertools.product(
        (33, 64, 128, 256, 512), ((1152, 896, 1), (4864, 896, 2), (896, 4864, 1))
    ):
        t = choose_tile(m, n, k, 132, parts)
        assert t.stages * 2 * t.bk * (t.bm + parts * t.bn) <= SHARED
        assert -(-m // t.bm) * -(-n // t.bn) * t.splits >= 56
