"""Matmuls of unusual input on every path: no rows, no terms, misaligned views, NaN and infinity, 2^31 elements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import genesis
from genesis.array import Array, empty
from genesis.backend import Device, backend_for
from genesis.dtypes import DType, bfloat16, float16, float32
from genesis.kernels.gemm import linalg
from genesis.kernels.gemm.linalg import matmul_into
from genesis.kernels.gemm.tiles import GemmTile
from genesis.shapes import Shape

CUDA = Device("cuda", 0)
ROUNDING = {bfloat16: 2.0**-8, float16: 2.0**-10, float32: 2e-6}
# By name: (layout, m, n, k, dtype, tile). Without a tile the sizes select the path.
TMA, THREADS = GemmTile(32, 32, 16, 4, 3), GemmTile(32, 32, 16, 4, 3, by_tma=False)
PATHS: dict[str, tuple[str, int, int, int, DType, GemmTile | None]] = {
    "tma": ("nt", 40, 72, 48, bfloat16, TMA),
    "tma, parts": ("tn", 40, 40, 96, float16, TMA._replace(split=3)),
    "tma, swapped": ("nn", 40, 72, 48, bfloat16, TMA._replace(swapped=True)),
    "tma, copied": ("nt", 40, 72, 48, bfloat16, TMA._replace(copies="ab")),
    "threads": ("nt", 40, 72, 48, bfloat16, THREADS),
    "threads, swapped": ("tt", 40, 72, 48, float16, THREADS._replace(swapped=True)),
    "threads, parts": ("nn", 40, 40, 96, bfloat16, THREADS._replace(split=2)),
    "odd sizes": ("nn", 33, 35, 37, bfloat16, None),
    "one row": ("nt", 1, 72, 80, bfloat16, None),
    "few rows": ("tn", 16, 512, 2048, bfloat16, None),
    "float32": ("nt", 40, 72, 48, float32, None),
    "float32, few rows": ("nt", 5, 72, 96, float32, None),
    "three rows": ("nt", 3, 72, 96, bfloat16, None),
}


def on_gpu(values: np.ndarray, dtype: DType, offset: int = 0) -> Array:
    """A device array whose memory begins `offset` elements after an allocation."""
    whole = empty((values.size + offset,), dtype, CUDA)
    backend_for(CUDA).from_numpy(np.concatenate([np.zeros(offset), values.ravel()]), whole)
    strides = tuple(int(np.prod(values.shape[i + 1 :])) for i in range(values.ndim))
    return whole.view(values.shape, strides, offset)


def operands(name: str, offset: int = 0, *, bad: bool = False) -> tuple[Array, Array, Array, np.ndarray]:
    """The operands of a path, out, and the expected result. With `bad`, single elements are NaN or infinite."""
    layout, m, n, k, dtype, _ = PATHS[name]
    rng = np.random.default_rng(5)
    a, b = rng.normal(size=(m, k)), rng.normal(size=(k, n))
    if bad:
        b[0, n - 1], b[k // 2, 1] = np.inf, np.nan
        a[m // 2 if m > 1 else [], k - 1] = np.nan
    x, y = (
        on_gpu(v.T, dtype, offset).view(v.shape, (1, v.shape[0]), offset) if c == "t" else on_gpu(v, dtype, offset)
        for c, v in zip(layout, (a, b), strict=True)
    )
    with np.errstate(invalid="ignore"):
        want = x.numpy().astype(np.float64) @ y.numpy().astype(np.float64)
    return empty((m, n), dtype, CUDA), x, y, want


def check(out: Array, want: np.ndarray) -> None:
    found = out.numpy().astype(np.float64)
    finite = np.isfinite(want)
    assert np.array_equal(found[~finite], want[~finite], equal_nan=True)
    assert np.abs(found[finite] - want[finite]).max() < ROUNDING[out.dtype] * np.abs(want[finite]).max()


@pytest.mark.parametrize("name", PATHS)
def test_nan_and_infinity_stay_in_their_rows_and_columns(name: str) -> None:
    out, x, y, want = operands(name, bad=True)
    assert 0 < np.isnan(want).sum() < want.size and np.isinf(want).any()
    matmul_into(out, x, y, tile=PATHS[name][5])
    check(out, want)


@pytest.mark.sample(cases=5)
@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("offset", (1, 3))
def test_misaligned_views_are_read_in_place(name: str, offset: int) -> None:
    out, x, y, want = operands(name, offset)
    matmul_into(out, x, y)
    check(out, want)


@pytest.mark.parametrize("dtype", (bfloat16, float32))
def test_without_terms_only_the_epilogue_is_stored(dtype: DType) -> None:
    out, x, y = on_gpu(np.ones((5, 24)), dtype), empty((5, 0), dtype, CUDA), empty((24, 0), dtype, CUDA)
    bias, residual = on_gpu(np.arange(24.0), dtype), on_gpu(np.full((5, 24), 3.0), dtype)
    matmul_into(out, x, y, transpose_b=True, bias=bias, residual=residual)
    assert np.array_equal(out.numpy().astype(np.float64), np.tile(np.arange(24.0) + 3, (5, 1)))
    matmul_into(out, x, y, transpose_b=True)
    assert not out.numpy().astype(np.float64).any()


@pytest.mark.parametrize("shapes", [((0, 8), (8, 16)), ((4, 8), (8, 0)), ((0, 3, 8), (0, 8, 16)), ((0, 0), (0, 0))])
def test_without_rows_or_columns_nothing_is_launched(
    shapes: tuple[Shape, Shape], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = (empty(shape, bfloat16, CUDA) for shape in shapes)
    monkeypatch.setattr(linalg, "launch", None)
    matmul_into(empty((*x.shape[:-1], y.shape[-1]), bfloat16, CUDA), x, y)


@pytest.mark.parametrize(
    "m, n, k", [(1 << 16, 40_000, 64), (1 << 16, 64, 40_000), (64, 1 << 16, 40_000), (1, 1 << 16, 40_000)]
)
@pytest.mark.parametrize("dtype", (bfloat16, float32))
def test_offsets_beyond_int32_are_wide(m: int, n: int, k: int, dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that addresses 2^31 elements through pointers has wide offsets; TMA takes coordinates. Nothing runs."""
    wide: dict[str, bool] = {}

    def note(kernel: Any, grid: Any, *args: Any, **keywords: Any) -> None:
        wide[kernel.__name__] = keywords["INT64"]

    monkeypatch.setattr(linalg, "launch", note)
    monkeypatch.setattr(linalg, "copy", lambda x, out: out)
    memory = empty((64,), dtype, CUDA).storage
    out, x, y = (Array(memory, shape, (shape[1], 1), dtype, CUDA) for shape in ((m, n), (m, k), (n, k)))
    matmul_into(out, x, y, transpose_b=True)
    assert wide and all(is_wide or (name == "gemm_tma" and out.size < 1 << 31) for name, is_wide in wide.items()), wide


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (genesis.bfloat16, genesis.float32))
def test_operands_and_results_of_more_than_2_31_elements(dtype: genesis.dtype) -> None:
    """The last rows of x·yᵀ, of xᵀ·y and of a wide result, whose sums bfloat16 holds, or rounds from 66,559."""
    k = 33_024  # 129·2^8
    x = genesis.ones((1 << 16, k), dtype=dtype, device="cuda")
    x[-1] = 32
    y = genesis.ones((8, k), dtype=dtype, device="cuda")
    assert (x @ y.T)[-2:].numpy().tolist() == [[k] * 8, [32 * k] * 8]
    wide = x[:, :8] @ y[:, :8].T.expand(8, 8).repeat(1, 4_200)
    assert wide.shape == (1 << 16, 33_600) and wide[-2:, -1].numpy().tolist() == [8, 256]
    tall = x.T @ x[:, :8]
    assert tall[-1].numpy().tolist() == [66_559 if dtype is genesis.float32 else 66_560] * 8
