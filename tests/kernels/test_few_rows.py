"""Matmuls of at most 32 rows against numpy: all epilogues, odd sizes, strided rows, NaN; and the choice of tiles."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest

from genesis.array import Array, empty
from genesis.autograd.modes import no_grad
from genesis.backend import Device, backend_for
from genesis.dtypes import DType, bfloat16, float8_e4m3fn, float16, float32, int8
from genesis.kernels.decode.few_rows import (
    FewRowsTile,
    Norm,
    choose_fma_tile,
    choose_mma_tile,
    choose_one_row_tile,
    few_rows_into,
    few_rows_swiglu_into,
    held_registers,
    is_for_few_rows,
)
from genesis.ops.shape import window

CUDA = Device("cuda", 0)
EPS = 1e-5
STEP = {bfloat16: 2.0**-8, float16: 2.0**-11, float32: 2.0**-21}
EPILOGUES = [(False, False, False), (True, True, False), (False, True, True), (True, False, True)]
SMALL = FewRowsTile(8, 16, 4, 2)
TENSOR_CORES = [FewRowsTile(8, 32, 2, 2), FewRowsTile(16, 32, 1, 1, True), FewRowsTile(32, 32, 4, 3)]
ONE_ROW = [FewRowsTile(*sizes, one_row=True) for sizes in ((4, 256, 1, 1), (16, 256, 2, 1, True), (4, 256, 8, 1))]
# One trip along K and several.
CODES = {False: [FewRowsTile(16, 32, 2, 2), FewRowsTile(16, 32, 1, 1, True)]}
CODES[True] = [FewRowsTile(8, 256, 2, 1, one_row=True), FewRowsTile(8, 256, 1, 4, True, one_row=True)]

FULL = pytest.mark.full


def sizes(rows: tuple[int, ...], more: tuple[int, ...] = ()) -> list[object]:
    """Rows of x, dtype, and whether rows are aligned, which the tensor cores need, and with them more than one row.

    float16 has few cases of its own: the rest is left to `make unit-full`.
    """
    return [
        pytest.param(m, dtype, aligned, marks=[FULL] if m in more or (dtype is float16 and m not in (1, 32)) else [])
        for m, dtype, aligned in itertools.product((*rows, *more), (bfloat16, float16, float32), (False, True))
        if m == 1 or (aligned and dtype is not float32)
    ]


def on_gpu(values: np.ndarray, dtype: DType) -> Array:
    array = empty(values.shape, dtype, CUDA)
    backend_for(CUDA).from_numpy(np.ascontiguousarray(values), array)
    return array


def wide(x: Array) -> np.ndarray:
    return x.numpy().astype(np.float64)


def rows_apart(values: np.ndarray, dtype: DType, aligned: bool = False) -> Array:
    """A matrix whose rows are not next to each other, NaN between them; aligned: each at a multiple of 16 elements."""
    rows, columns = values.shape
    before, width = (16, -(-columns // 16) * 16 + 32) if aligned else (3, columns + 7)
    padded = np.full((rows, width), np.nan)
    padded[:, before : before + columns] = values
    return window(on_gpu(padded, dtype), before, before + columns)


def normalised(x: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rstd = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)
    return x * rstd * scale, rstd[:, 0]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("m", "dtype", "aligned"), sizes((1, 7, 32), (2, 16, 17)))
@pytest.mark.parametrize(("with_norm", "with_bias", "with_residual"), EPILOGUES)
def test_epilogues(m: int, dtype: DType, with_norm: bool, with_bias: bool, with_residual: bool, aligned: bool) -> None:
    """Sizes that no tile divides, in memory that held NaN."""
    n, k = 29, 101
    rng = np.random.default_rng(m)
    x, w = (rows_apart(v, dtype, aligned) for v in (rng.normal(size=(m, k)), rng.normal(size=(n, k)) / np.sqrt(k)))
    scale, bias, residual = (on_gpu(rng.normal(size=shape), dtype) for shape in ((k,), (n,), (m, n)))
    out, rstd = on_gpu(np.full((m, n), np.nan), dtype), on_gpu(np.full((m,), np.nan), float32)
    norm = Norm(scale, EPS, rstd) if with_norm else None
    on_tensor_cores = aligned and dtype.itemsize == 2 and not (with_norm and dtype is float16 and m == 1)
    for tile in (None, *(TENSOR_CORES if m > 1 else [SMALL, *(ONE_ROW if on_tensor_cores else ())])):
        few_rows_into(
            out, x, w, norm=norm, bias=bias if with_bias else None, residual=residual if with_residual else None,
            tile=tile,
        )  # fmt: skip
        normed, want_rstd = normalised(wide(x), wide(scale)) if with_norm else (wide(x), None)
        want = normed @ wide(w).T + with_bias * wide(bias) + with_residual * wide(residual)
        np.testing.assert_allclose(wide(out), want, rtol=STEP[dtype], atol=4 * STEP[dtype] if with_norm else 1e-5)
        if want_rstd is not None:
            np.testing.assert_allclose(wide(rstd), want_rstd, rtol=1e-6)


@pytest.mark.sample
@pytest.mark.parametrize(("m", "dtype", "aligned"), sizes((1, 5, 12, 32)))
def test_swiglu(m: int, dtype: DType, aligned: bool) -> None:
    """gate | up side by side as one weight holds them, or two; h is of both as they are stored."""
    f, k = 43, 90
    rng = np.random.default_rng(m)
    x, scale = rows_apart(rng.normal(size=(m, k)), dtype, aligned), on_gpu(rng.normal(size=(k,)), dtype)
    gate, up = (rows_apart(rng.normal(size=(f, k)) / np.sqrt(k), dtype, aligned) for _ in range(2))
    h, gate_up = on_gpu(np.full((m, f), np.nan), dtype), on_gpu(np.full((m, 2 * f), np.nan), dtype)
    rstd = on_gpu(np.full((m,), np.nan), float32)
    few_rows_swiglu_into(h, gate_up, x, gate, up, norm=Norm(scale, EPS, rstd))
    normed, want_rstd = normalised(wide(x), wide(scale))
    want = np.concatenate([normed @ wide(gate).T, normed @ wide(up).T], 1)
    np.testing.assert_allclose(wide(gate_up), want, rtol=STEP[dtype], atol=4 * STEP[dtype])
    np.testing.assert_allclose(wide(rstd), want_rstd, rtol=1e-6)
    g, u = np.split(wide(gate_up), 2, -1)
    np.testing.assert_allclose(wide(h), g / (1 + np.exp(-g)) * u, rtol=1.01 * STEP[dtype], atol=1e-6)


@pytest.mark.sample
@pytest.mark.parametrize("kind", [float8_e4m3fn, int8])
@pytest.mark.parametrize(
    ("m", "dtype", "k"),
    [
        *itertools.product((1,), (bfloat16, float32), (70, 80)),
        (1, bfloat16, 784),
        (1, float16, 80),
        (3, bfloat16, 80),
        (20, bfloat16, 80),
    ],
)
def test_codes_with_a_scale_a_row(m: int, dtype: DType, kind: DType, k: int) -> None:
    n = 45
    rng = np.random.default_rng(m)
    codes = rng.integers(-127, 128, (2 * n, k)).astype(kind.numpy)
    x, scale = on_gpu(rng.normal(size=(m, k)), dtype), on_gpu(rng.random(2 * n) / 500, float32)
    w, residual = on_gpu(codes, kind), on_gpu(rng.normal(size=(m, 2 * n)), dtype)
    out, h = on_gpu(np.full((m, 2 * n), np.nan), dtype), on_gpu(np.full((m, n), np.nan), dtype)
    want = wide(x) @ (codes.astype(np.float64) * wide(scale)[:, None]).T
    for tile in (None, *(CODES[m == 1] if dtype.itemsize == 2 and k % 16 == 0 else ())):
        few_rows_into(out, x, w, residual=residual, w_scale=scale, tile=tile)
        np.testing.assert_allclose(wide(out), want + wide(residual), rtol=STEP[dtype], atol=1e-5)
    halves = [w.view((n, k), (k, 1), w.offset + i * n * k) for i in range(2)]
    few_rows_swiglu_into(h, out, x, *halves, w_scale=scale)
    np.testing.assert_allclose(wide(out), want, rtol=STEP[dtype], atol=1e-5)


@pytest.mark.parametrize("kind", [float8_e4m3fn, int8])
def test_codes_with_values_beyond_float16(kind: DType) -> None:
    """One row of bfloat16 becomes float16 on the way: a power of two in front of it changes nothing else."""
    n, k = 24, 528
    rng = np.random.default_rng(3)
    values = rng.normal(size=(1, k)) * 2.0 ** rng.integers(-6, 7, (1, k))
    w, scale = on_gpu(rng.integers(-127, 128, (n, k)).astype(kind.numpy), kind), on_gpu(rng.random(n), float32)
    outs = []
    for power in (0, 90, -90):
        out = on_gpu(np.full((1, n), np.nan), bfloat16)
        few_rows_into(out, on_gpu(values * 2.0**power, bfloat16), w, w_scale=scale)
        outs.append(wide(out) / 2.0**power)
    np.testing.assert_array_equal(outs[1], outs[0])
    np.testing.assert_array_equal(outs[2], outs[0])
    want = wide(on_gpu(values, bfloat16)) @ (wide(w) * wide(scale)[:, None]).T
    np.testing.assert_allclose(outs[0], want, rtol=STEP[bfloat16], atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [bfloat16, float8_e4m3fn, int8])
@pytest.mark.parametrize(
    ("n", "k", "halves"), [(1152, 896, 1), (4864, 896, 2), (896, 4864, 1), (8192, 2048, 2), (4096, 1536, 1)]
)
def test_one_row_of_whole_layers(n: int, k: int, halves: int, kind: DType) -> None:
    """The tiles that the rule has for them, with all that a layer may add."""
    rng = np.random.default_rng(k)
    values = rng.integers(-127, 128, (halves * n, k)) / (1 if kind is not bfloat16 else 127)
    w, x = on_gpu(values, kind), on_gpu(rng.normal(size=(1, k)), bfloat16)
    scale = on_gpu(rng.random(halves * n) / 127, float32) if kind is not bfloat16 else None
    norm = Norm(on_gpu(rng.normal(size=(k,)), bfloat16), EPS)
    out = on_gpu(np.full((1, halves * n), np.nan), bfloat16)
    normed, _ = normalised(wide(x), wide(norm.scale))
    want = normed @ (wide(w) * (1 if scale is None else wide(scale)[:, None])).T
    if halves == 2:
        h = on_gpu(np.full((1, n), np.nan), bfloat16)
        gate, up = (w.view((n, k), (k, 1), w.offset + i * n * k) for i in range(2))
        few_rows_swiglu_into(h, out, x, gate, up, norm=norm, w_scale=scale)
        g, u = np.split(wide(out), 2, -1)
        np.testing.assert_allclose(wide(h), g / (1 + np.exp(-g)) * u, rtol=1.01 * STEP[bfloat16], atol=1e-6)
    else:
        few_rows_into(out, x, w, norm=norm, w_scale=scale)
    # x·scale is rounded to bfloat16, by up to STEP of each, evenly: six standard deviations of the sum
    atol = 6 / np.sqrt(3) * STEP[bfloat16] * want.std()
    np.testing.assert_allclose(wide(out), want, rtol=STEP[bfloat16], atol=atol)


@pytest.mark.parametrize("m", [1, 4, 32])
def test_nan_and_infinity_stay_in_their_row(m: int) -> None:
    n, k = 20, 50 if m == 1 else 64
    rng = np.random.default_rng(0)
    values, weights = rng.normal(size=(m, k)), rng.normal(size=(n, k))
    values[m - 1, k - 1] = np.nan
    weights[3, 7], weights[n - 1, 0] = np.nan, np.inf
    out = on_gpu(np.zeros((m, n)), bfloat16)
    few_rows_into(out, on_gpu(values, bfloat16), on_gpu(weights, bfloat16))
    found = wide(out)
    assert np.isnan(found[m - 1]).all()
    assert np.isnan(found[:, 3]).all()
    assert np.isinf(found[: m - 1, n - 1]).all()
    assert np.isfinite(np.delete(found[: m - 1], [3, n - 1], 1)).all()


@pytest.mark.parametrize(("few", "many"), [(2, 8), (9, 16), (17, 32)])
def test_a_row_does_not_depend_on_the_rows_beside_it(few: int, many: int) -> None:
    n, k = 40, 160
    rng = np.random.default_rng(1)
    values, w = rng.normal(size=(many, k)), on_gpu(rng.normal(size=(n, k)), bfloat16)
    outs = [on_gpu(np.zeros((m, n)), bfloat16) for m in (few, many)]
    for m, out in zip((few, many), outs, strict=True):
        few_rows_into(out, on_gpu(values[:m], bfloat16), w)
    np.testing.assert_array_equal(wide(outs[0]), wide(outs[1])[:few])


def test_which_matmuls_are_of_few_rows() -> None:
    def taken(shape: tuple[int, ...], dtype: DType, transposed: bool = False) -> bool:
        w = on_gpu(np.ones((6, shape[-1])), dtype)
        if transposed:
            w = on_gpu(np.ones((shape[-1], 6)), dtype)
            w = w.view((6, shape[-1]), (1, 6))
        with no_grad():
            return is_for_few_rows(on_gpu(np.ones(shape), dtype), w)

    assert taken((32, 16), bfloat16)
    assert taken((8, 4, 16), float16)
    assert taken((1, 1, 7), float32)
    assert not taken((2, 16), float32)
    assert not taken((2, 8), bfloat16)
    assert not taken((33, 16), bfloat16)
    assert not taken((0, 16), bfloat16)
    assert not taken((1, 16), bfloat16, transposed=True)


@pytest.mark.parametrize(
    ("n", "k", "halves", "norm", "steps"),
    [
        (4864, 896, 2, True, 2),  # 304 programs, three of them on each of 132 SMs: one round, of 2 steps at a time
        (8192, 2048, 2, True, 3),  # 512 programs take two rounds with two or three on an SM: as many steps as fit
        (896, 4864, 1, False, 7),  # 56 programs: one has an SM for itself
        (151936, 896, 1, False, 3),
    ],
)
def test_programs_of_32_rows_take_few_rounds(n: int, k: int, halves: int, norm: bool, steps: int) -> None:
    assert [choose_mma_tile(m, n, k, 132, halves, norm).steps for m in (17, 32)] == [steps, steps]


def test_one_row_has_few_programs_all_of_them_resident() -> None:
    """Rows of W, warps and steps, as measured within steps of models on an H100."""
    of_codes, of_floats = (
        [choose_one_row_tile(n, k, itemsize, 132, halves, norm) for n, k, halves, norm in (
            (4864, 896, 2, True), (4096, 1024, 1, True), (896, 4864, 1, False), (2240, 1536, 1, True))]
        for itemsize in (1, 2)
    )  # fmt: skip
    assert [(t.bn, t.warps, t.steps) for t in of_codes] == [(16, 4, 1), (16, 4, 1), (8, 4, 5), (8, 2, 3)]
    # gate|up of 0.5B as (8, 4, 1) would have 608 programs, of which 4 are resident on an SM
    assert [(t.bn, t.warps, t.steps) for t in of_floats] == [(4, 1, 2), (8, 4, 1), (4, 4, 5), (4, 2, 3)]


@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_tiles_fit(itemsize: int) -> None:
    """Shared memory of the pipeline, and powers of two, for sizes from tiny to a vocabulary."""
    for m, n, k, halves in itertools.product(
        (1, 2, 8, 16, 32), (5, 896, 1536, 4608, 18944, 151936), (3, 896, 1536, 3584, 8192, 18944), (1, 2)
    ):
        t = choose_fma_tile(k, itemsize)
        assert t.bn & (t.bn - 1) == t.bk & (t.bk - 1) == 0
        assert t.bk >= 16
        assert 1 <= t.steps <= 5
        for norm in (False, True) if itemsize < 4 else ():
            t = choose_one_row_tile(n, k, itemsize, 132, halves, norm)
            assert t.bn in (4, 8, 16)
            assert t.bn == 4 or 4 * -(-n // t.bn) >= 3 * itemsize * 132  # programs
            assert t.warps in (1, 2, 4)
            assert 1 <= t.steps * (2 * itemsize * halves * t.bn + 4 + 4 * norm) <= 128  # registers for loads
        for norm in (False, True) if itemsize == 2 else ():
            t = choose_mma_tile(m, n, k, 132, halves, norm)
            assert t.bn in (8, 16, 32)
            assert t.warps in (4, 8)
            of_w, of_x = max(1, t.bn // 16) * halves, max(1, m // 8)
            tiles = of_w * max(1, of_x // 2) + norm * max(1, of_x // 2)
            assert tiles * t.warps * (512 if of_x == 1 else 1024) <= 44 << 10  # of shared memory without asking
            registers = held_registers(of_x, t.bn, t.steps, halves, norm)
            assert registers <= 200
            assert 32 * t.warps * (registers + 40) <= 65536


CODE = """
import re, sys
from genesis.backend.cuda.compile import Signature, compiled, dependent
from genesis.kernels.decode.few_rows_fma import few_rows_fma_kernel
from genesis.kernels.decode.few_rows_mma import few_rows_mma_kernel
from genesis.kernels.decode.one_row_mma import one_row_mma_kernel

A, NONE, SHARED = "*bf16:16", ("constexpr", None), dict(K=896, STEPS=2, OVERLAP=True)
OPERANDS = (A, A, "*fp32:16", A, A, A, A, NONE, NONE, NONE)
for kernel, constants in (
    (few_rows_fma_kernel, dict(BN=4, BK=256, BW=4, EARLY=False)),
    (few_rows_mma_kernel, dict(BM=8, BN=8, BS=4, EARLY=False)),
    (few_rows_fma_kernel, dict(BN=4, BK=256, BW=4, EARLY=True)),
    (few_rows_mma_kernel, dict(BM=8, BN=8, BS=4, EARLY=True)),
    (one_row_mma_kernel, dict(BN=4, BS=1, EARLY=False)),
    (one_row_mma_kernel, dict(BN=4, BS=1, EARLY=True)),
):
    if str(constants["EARLY"]) not in sys.argv:
        continue
    made_for = tuple(sorted({**SHARED, **constants}.items()))
    sizes = ("i32", *["i32:16"] * 4) if kernel is few_rows_mma_kernel else ("i32:16",) * 2
    signature = Signature((*OPERANDS, *sizes, "fp32"), made_for, (("num_warps", constants.get("BS", 4)),))
    text = dependent(compiled(kernel, signature, (9, 0)).asm["ptx"])
    wait = text.index("griddepcontrol.wait")
    assert text.count("griddepcontrol.wait") == 1
    assert text.index("griddepcontrol.launch_dependents") < wait
    reads = [each.start() for each in re.finditer(r"ld[.]global|cp[.]async", text)]
    early = sum(each < wait for each in reads)
    assert len(reads) - early > 4 and "st.global" not in text[:wait]
    assert (early >= 3) if constants["EARLY"] is True else early == 0
    print(kernel.__name__)
"""


@pytest.mark.full
@pytest.mark.host
@pytest.mark.parametrize("early", [True, False])
def test_nothing_is_written_before_the_wait_and_read_where_the_caller_says_so(early: bool) -> None:
    """As compiled for Hopper."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", CODE, str(early)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    fma, mma, one = "few_rows_fma_kernel", "few_rows_mma_kernel", "one_row_mma_kernel"
    assert sorted(done.stdout.split()) == [fma, mma, one], done.stderr
