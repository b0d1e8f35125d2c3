"""var, std and logsumexp over one tile and several: accurate far from 0, and IEEE results for infinite elements."""

from __future__ import annotations

import numpy as np
import pytest

from genesis.array import Array, empty
from genesis.backend import Device, backend_for
from genesis.dtypes import float32
from genesis.ops.reduce import logsumexp, std, var

CUDA = Device("cuda", 0)
# Rows of one tile, padded and full, and of several; columns of one and of several; everything, in parts.
CASES = [
    ((16, 896), 1),
    ((8, 1024), 1),
    ((3, 4864), 1),
    ((2, 20_000), 1),
    ((5, 40), 0),
    ((1200, 40), 0),
    ((70_000,), 0),
]


def on_gpu(x: np.ndarray) -> Array:
    array = empty(x.shape, float32, CUDA)
    backend_for(CUDA).from_numpy(np.ascontiguousarray(x, np.float32), array)
    return array


@pytest.mark.sample
@pytest.mark.parametrize(("shape", "axis"), CASES)
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_variance_far_from_zero(shape: tuple[int, ...], axis: int, offset: float) -> None:
    x = (offset + np.random.default_rng(0).standard_normal(shape)).astype(np.float32)
    want = x.astype(np.float64).var(axis, ddof=1)
    # The mean is rounded before and after each element, and the product of both deviations has both errors.
    bound = 1e-6 * want + 4 * np.sqrt(want) * offset * 2.0**-24
    assert (np.abs(var(on_gpu(x), axis, correction=1.0).numpy() - want) <= bound).all()
    assert (np.abs(std(on_gpu(x), axis, correction=1.0).numpy() - np.sqrt(want)) <= bound / np.sqrt(want)).all()


@pytest.mark.sample
@pytest.mark.parametrize(("shape", "axis"), CASES)
@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_deviations_whose_squares_are_out_of_range(shape: tuple[int, ...], axis: int, scale: float) -> None:
    x = (scale * np.random.default_rng(0).standard_normal(shape)).astype(np.float32)
    want = x.astype(np.float64).std(axis, ddof=1)
    np.testing.assert_allclose(std(on_gpu(x), axis, correction=1.0).numpy(), want, rtol=2e-7)


@pytest.mark.parametrize(("shape", "axis"), CASES)
def test_constants_have_no_variance(shape: tuple[int, ...], axis: int) -> None:
    assert not std(on_gpu(np.full(shape, 0.1)), axis, correction=0.0).numpy().any()


@pytest.mark.sample(cases=6)
@pytest.mark.parametrize(("shape", "axis"), CASES)
@pytest.mark.parametrize("offset", [0.0, 90.0, -200.0])
def test_exponentials_out_of_range(shape: tuple[int, ...], axis: int, offset: float) -> None:
    x = (offset + 3 * np.random.default_rng(1).standard_normal(shape)).astype(np.float32)
    top = x.max(axis, keepdims=True).astype(np.float64)
    want = np.log(np.exp(x - top).sum(axis)) + top.squeeze(axis)
    # The maximum is rounded where it is subtracted and added; the sum has errors of its depth and of an exponential.
    units = np.abs(want) + np.abs(top).squeeze(axis) + np.log2(shape[axis]) + 4
    assert (np.abs(logsumexp(on_gpu(x), axis).numpy() - want) <= units * np.finfo(np.float32).eps).all()


@pytest.mark.parametrize("width", [3, 9000])  # of one tile, and of several
def test_infinite_elements(width: int) -> None:
    inf, nan = np.inf, np.nan
    rows = [[inf, 1, 2], [-inf, -inf, -inf], [nan, 1, 2], [-inf, 0, -inf], [inf, -inf, 0], [inf, inf, nan]]
    x = np.full((len(rows), width), -inf, np.float32)
    x[:, [0, width // 2, width - 1]] = rows
    np.testing.assert_array_equal(logsumexp(on_gpu(x), 1).numpy(), np.float32([inf, -inf, nan, 0, inf, nan]))
    assert np.isnan(var(on_gpu(x), 1, correction=1.0).numpy()).all()
