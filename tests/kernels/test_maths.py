"""Powers, quotients and remainders of float32, which kernels compute themselves: right to the rounding, and IEEE's
answers where there are none.

In the interpreter the op `pow` takes numpy's; the function that GPUs run is launched here.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl

import genesis
from genesis import Tensor
from genesis.array import Array, empty
from genesis.backend import Device, backend_for
from genesis.backend.cuda.launch import launch
from genesis.dtypes import NAMES, DType, float32
from genesis.kernels.maths import fast_power, float32_power, quotient_remainder
from genesis.ops.elementwise import floor_divide, remainder
from genesis.ops.error_function import erf_values

CUDA = Device("cuda", 0)


@triton.jit
def powers(p_o, p_x, p_p, n, F: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    x, p = tl.load(p_x + i, mask=i < n, other=1), tl.load(p_p + i, mask=i < n, other=1)
    tl.store(p_o + i, F(x, p), mask=i < n)


def on_gpu(values: np.ndarray, dtype: DType = float32) -> Array:
    array = empty(values.shape, dtype, CUDA)
    backend_for(CUDA).from_numpy(values, array)
    return array


def power(x: np.ndarray, p: np.ndarray, function: Any = float32_power) -> np.ndarray:
    out = empty(x.shape, float32, CUDA)
    with np.errstate(all="ignore"):
        launch(powers, triton.cdiv(x.size, 1024), out, on_gpu(x), on_gpu(p), x.size, F=function, B=1024)
    return out.numpy()


def units(found: np.ndarray, x: np.ndarray, p: np.ndarray) -> float:
    """The largest error in ulps, of results in float32's range."""
    with np.errstate(all="ignore"):
        want = np.power(x.astype(np.longdouble), p.astype(np.longdouble))
        kept = np.abs(want) <= np.finfo(np.float32).max
        assert kept.sum() > 1000
        unit = np.spacing(np.maximum(np.abs(want[kept]).astype(np.float32), np.float32(1e-45)))
    return float(np.max(np.abs(found[kept].astype(np.longdouble) - want[kept]) / unit))


@pytest.mark.parametrize("kind", ("any", "near 1", "of one size", "subnormal", "whole"))
def test_powers_are_right_to_the_rounding(kind: str) -> None:
    rng = np.random.default_rng(1)
    x, p = np.exp2(rng.uniform(-126, 127, 20000)), rng.uniform(-1, 1, 20000)
    if kind == "near 1":
        x, p = 1 + rng.normal(size=20000) * 2.0 ** rng.integers(-22, -3, 20000), rng.uniform(-1e4, 1e4, 20000)
    if kind == "of one size":
        x, p = rng.uniform(0.5, 2, 20000), rng.uniform(-120, 120, 20000)
    if kind == "subnormal":
        x, p = np.exp2(rng.uniform(-149, -126, 20000)), rng.uniform(-0.8, 1, 20000)
    if kind == "whole":
        x, p = rng.normal(size=20000) * 4, rng.integers(-20, 20, 20000)
    x, p = x.astype(np.float32), p.astype(np.float32)
    assert units(power(x, p), x, p) < 0.501


def test_results_that_float32_holds_are_exact() -> None:
    x, p = (np.array(v, np.float32).ravel() for v in np.meshgrid([2, -2, 3, 5, 0.5, 9, 16, 10, -1, 4096], range(-8, 8)))
    exact = x.astype(np.float64) ** p.astype(np.float64)
    held = exact.astype(np.float32).astype(np.float64) == exact
    assert held.sum() > 80
    np.testing.assert_array_equal(power(x, p)[held], exact[held].astype(np.float32))
    roots = np.arange(1, 4097, dtype=np.float32)
    np.testing.assert_array_equal(power(roots * roots, np.full_like(roots, 0.5)), roots)


def test_results_beyond_float32_and_below() -> None:
    x, p = np.array([2, 2, 2, 0.5, 10, 10, 2, 2, 2, -2, -2], np.float32), np.array(
        [128, 127, 1e30, 200, 38, 39, -149, -150, -151, -149, 129], np.float32
    )  # fmt: skip
    with np.errstate(all="ignore"):
        want = np.power(x.astype(np.float64), p.astype(np.float64)).astype(np.float32)
    found = power(x, p)
    assert found.tobytes() == want.tobytes(), (found, want)


@pytest.mark.parametrize("dtype", (np.float16, ml_dtypes.bfloat16))
@pytest.mark.parametrize("reach", (60, 0.9))  # of exponents; with the lower one all results are normal
def test_fast_powers_are_within_an_ulp_of_2_bytes(dtype: Any, reach: float) -> None:
    rng = np.random.default_rng(3)
    x, p = np.exp2(rng.uniform(-1, 1, 20000) * 2.0 ** rng.integers(-9, 4, 20000)), rng.uniform(-reach, reach, 20000)
    x, p = x.astype(dtype).astype(np.float32), p.astype(dtype).astype(np.float32)
    with np.errstate(all="ignore"):
        want = np.power(x.astype(np.float64), p.astype(np.float64)).astype(dtype)
        found = power(x, p, fast_power).astype(dtype)
    assert np.isfinite(want.astype(np.float32)).sum() > 10000
    steps = np.abs(found.view(np.int16).astype(int) - want.view(np.int16).astype(int))
    assert steps.max() <= 1 and (steps == 1).mean() < 0.01


@pytest.mark.parametrize("dtype", (np.float16, ml_dtypes.bfloat16))
def test_fast_exponentials_are_within_an_ulp_of_2_bytes(dtype: Any) -> None:
    x = np.concatenate([np.linspace(-94, 89, 20000), [np.inf, -np.inf, np.nan]]).astype(dtype)
    with np.errstate(all="ignore"):
        want = np.exp(x.astype(np.float64)).astype(dtype)
    found = genesis.exp(Tensor.wrap(on_gpu(x, NAMES[x.dtype.name]))).numpy()
    steps = np.abs(found.view(np.int16).astype(int) - want.view(np.int16).astype(int))[:-1]
    assert steps.max() <= 1 and (steps == 1).mean() < 0.01 and np.isnan(found[-1])
    assert ((want != 0) & (np.abs(want) < float(ml_dtypes.finfo(dtype).tiny))).sum() > 50  # subnormal results


@pytest.mark.parametrize("dtype", (np.float16, ml_dtypes.bfloat16))
def test_fast_error_functions_are_within_an_ulp_of_2_bytes(dtype: Any) -> None:
    sizes = np.concatenate([np.linspace(0, 5, 20000), np.geomspace(1e-7, 1, 20000), [0, np.inf, np.nan]])
    x = np.concatenate([sizes, -sizes]).astype(dtype)
    want = erf_values(x.astype(np.float64)).astype(dtype)
    found = genesis.erf(Tensor.wrap(on_gpu(x, NAMES[x.dtype.name]))).numpy()
    assert (np.isnan(found) == np.isnan(x)).all()
    steps = np.abs(found.view(np.int16).astype(int) - want.view(np.int16).astype(int))[~np.isnan(x)]
    assert steps.max() <= 1 and (steps == 1).mean() < 0.02


@pytest.mark.parametrize("function", (float32_power, fast_power), ids=("exact", "fast"))
def test_what_has_no_power_is_as_ieee_says(function: Any) -> None:
    inf, nan, tiny = np.inf, np.nan, 1e-45
    bases = [0.0, -0.0, 1, -1, inf, -inf, nan, 2, -2, 0.5, -0.5, tiny, -tiny, 3.4e38, -3.4e38]
    exponents = [0.0, -0.0, 1, -1, 2, -2, 3, -3, 0.5, -0.5, 2.5, inf, -inf, nan, tiny, -tiny, 16777215, -16777215,
                 16777216, 3e38, -3e38, 8388607.5]  # fmt: skip
    x, p = (np.array(v, np.float32) for v in zip(*itertools.product(bases, exponents), strict=True))
    with np.errstate(all="ignore"):
        want = np.power(x.astype(np.float64), p.astype(np.float64)).astype(np.float32)
    found = power(x, p, function)
    if function is fast_power:
        found, want = (v.astype(ml_dtypes.bfloat16).astype(np.float32) for v in (found, want))
    wrong = (np.isnan(found) != np.isnan(want)) | ~np.isnan(want) & (found.view(np.int32) != want.view(np.int32))
    assert not wrong.any(), [v[wrong] for v in (x, p, found, want)]


@triton.jit
def parts(p_whole, p_rest, p_held, p_x, p_y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    x, y = tl.load(p_x + i, mask=i < n, other=1), tl.load(p_y + i, mask=i < n, other=1)
    whole, rest, held = quotient_remainder(x, y)
    tl.store(p_whole + i, whole, mask=i < n)
    tl.store(p_rest + i, rest, mask=i < n)
    tl.store(p_held + i, held.to(tl.float32), mask=i < n)


def pairs(kind: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=3000), rng.normal(size=3000)
    if kind == "far apart":
        x, y = np.ldexp(x, rng.integers(-20, 40, 3000)), np.ldexp(y, rng.integers(-20, 10, 3000))
    if kind == "multiples":
        y = np.round(y * 64) / 64 + 1 / 128
        x = (y * rng.integers(-(1 << 18) - 2, (1 << 18) + 2, 3000)).astype(np.float32)
        x = np.where(rng.random(3000) < 0.5, x, np.nextafter(x, np.where(rng.random(3000) < 0.5, -np.inf, np.inf)))
    if kind == "any size":
        x, y = (np.ldexp(v, rng.integers(-149, 127, 3000)) for v in (x, y))
    return x.astype(np.float32), y.astype(np.float32)


@pytest.mark.parametrize("kind", ("alike", "far apart", "multiples", "any size"))
def test_quotients_and_remainders_are_exact(kind: str) -> None:
    x, y = pairs(kind)
    kept = (y != 0) & (np.abs(x.astype(np.float64)) < 2.0**127 * np.abs(y.astype(np.float64)))
    x, y = x[kept], y[kept]
    out = [empty(x.shape, float32, CUDA) for _ in range(3)]
    with np.errstate(all="ignore"):
        launch(parts, triton.cdiv(x.size, 1024), *out, on_gpu(x), on_gpu(y), x.size, B=1024)
    whole, rest, held = (a.numpy() for a in out)
    assert held.sum() > (300 if kind == "any size" else 1500)
    for a, b, q, r in zip(*(v[held != 0] for v in (x, y, whole, rest)), strict=True):
        a, b = abs(Fraction(float(a))), abs(Fraction(float(b)))
        assert (q, Fraction(float(r))) == (a // b, a % b), (a, b)
    found, left = (f(on_gpu(x), on_gpu(y)).numpy() for f in (floor_divide, remainder))
    for a, b, q, r in zip(x, y, found, left, strict=True):
        a, b = Fraction(float(a)), Fraction(float(b))
        assert q == a // b or (abs(a // b) >= 1 << 18 and abs(float(q) / float(a // b) - 1) < 2.0**-22), (a, b)
        assert r == np.float32(a % b), (a, b)


def test_one_infinite_quotient_leaves_its_neighbours_exact() -> None:
    x, y = np.full(1024, 7.5, np.float32), np.full(1024, -2, np.float32)
    x[3], y[5], y[6], x[7], x[8] = math.inf, 0, math.nan, 2.0**40, -0.0
    found, left = (f(on_gpu(x), on_gpu(y)).numpy() for f in (floor_divide, remainder))
    assert (np.delete(found, [3, 5, 6, 7, 8]) == -4).all()
    assert (np.delete(left, [3, 5, 6, 7, 8]) == -0.5).all()
    np.testing.assert_array_equal(found[[3, 5, 6, 7, 8]], [math.nan, math.inf, math.nan, -(2.0**39), 0])
    np.testing.assert_array_equal(left[[3, 5, 6, 7, 8]], [math.nan, math.nan, math.nan, 0, 0])
