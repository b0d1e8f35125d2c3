"""Scans whose lines are split among programs, which the samples of the registry are too small for."""

from __future__ import annotations

import numpy as np
import pytest
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend import backend_for
from genesis.dtypes import as_dtype, float32
from genesis.kernels.reduce import plan, scan
from genesis.kernels.reduce.reduce import ADD
from genesis.op import registry
from tests.ops.devices import CUDA


def on_device(values: np.ndarray) -> Array:
    array = empty(values.shape, as_dtype(values.dtype), CUDA)
    backend_for(CUDA).from_numpy(values, array)
    return array


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "SCAN_TILE", 512)
    monkeypatch.setattr(plan, "SCAN_TILES", 4)
    monkeypatch.setattr(scan, "TOTALS", tl.constexpr(2))


@pytest.mark.sample
@pytest.mark.parametrize("dtype", ["float32", "int64"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("shape", "axis"), [((3500,), 0), ((3, 1700), 1), ((3, 900), 1), ((2, 5000), 1), ((700, 5), 0), ((2, 300, 3), 1)]
)
def test_lines_are_scanned_by_several_programs(
    shape: tuple[int, ...], axis: int, reverse: bool, dtype: str
) -> None:  # fmt: skip
    inner = axis == len(shape) - 1
    assert plan.scan_tiles(int(np.prod(shape)) // shape[axis], shape[axis], inner).splits > 1
    x = np.random.default_rng(1).integers(-9, 9, shape).astype(dtype)
    found = registry["cumsum"](on_device(x), axis=axis, reverse=reverse).numpy()
    expected = np.flip(np.flip(x, axis).cumsum(axis), axis) if reverse else x.cumsum(axis)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("shape", "axis"), [((3500,), 0), ((900,), 0), ((700, 5), 0), ((3, 40), 1)])
def test_exclusive_scans(shape: tuple[int, ...], axis: int, reverse: bool) -> None:
    x = np.random.default_rng(2).integers(-9, 9, shape).astype(np.float32)
    out = empty(shape, float32, CUDA)
    scan.scan_into(ADD, out, on_device(x), (axis,), float32, reverse=reverse, exclusive=True)
    whole = np.flip(np.flip(x, axis).cumsum(axis), axis) if reverse else x.cumsum(axis)
    assert np.array_equal(out.numpy(), whole - x)
