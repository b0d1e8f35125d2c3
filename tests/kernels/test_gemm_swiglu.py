"""Gate and up with SwiGLU: their values, and which weights are one matmul."""

from __future__ import annotations

import numpy as np
import pytest

import genesis.kernels.gemm.norm_linear as cuda_impls
from genesis.array import Array, empty
from genesis.backend import Device, backend_for
from genesis.dtypes import DType, bfloat16, float16
from genesis.kernels.gemm.gated import gemm_swiglu_into
from genesis.ops.norm_linear import norm_mlp

CUDA = Device("cuda", 0)


def on_gpu(values: np.ndarray, dtype: DType) -> Array:
    array = empty(values.shape, dtype, CUDA)
    backend_for(CUDA).from_numpy(np.ascontiguousarray(values), array)
    return array


def wide(x: Array) -> np.ndarray:
    return x.numpy().astype(np.float64)


def expected(gate_up: np.ndarray) -> np.ndarray:
    gate, up = np.split(gate_up, 2, axis=-1)
    found: np.ndarray = gate / (1 + np.exp(-gate)) * up
    return found


@pytest.mark.parametrize("dtype", [bfloat16, float16])
@pytest.mark.parametrize("columns", [72, 36, 35])
def test_columns_that_tma_can_address_or_not(columns: int, dtype: DType) -> None:
    """Rows, columns and steps that tiles do not divide."""
    m, f, k = 70, columns, 40
    rng = np.random.default_rng(3)
    x, w = on_gpu(rng.normal(size=(m, k)), dtype), on_gpu(rng.normal(size=(2 * f, k)) / np.sqrt(k), dtype)
    h, gate_up = (on_gpu(np.full((m, n), np.nan), dtype) for n in (f, 2 * f))
    gemm_swiglu_into(h, gate_up, x, w)
    step = 2.0**-8 if dtype is bfloat16 else 2.0**-11
    want = wide(x) @ wide(w).T
    np.testing.assert_allclose(wide(gate_up), want, rtol=step, atol=1e-5)
    np.testing.assert_allclose(wide(h), expected(wide(gate_up)), rtol=1.01 * step, atol=1e-6)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_contiguous_weights_are_one_matmul(
    bias: bool, apart: bool, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Array] = []

    def spy(h: Array, gate_up: Array, x: Array, weight: Array) -> None:
        calls.append(weight)
        gemm_swiglu_into(h, gate_up, x, weight)

    monkeypatch.setattr(cuda_impls, "gemm_swiglu_into", spy)
    rng, f, k = np.random.default_rng(5), 24, 16
    both = on_gpu(rng.normal(size=(2 * f + apart, k)) / 4, bfloat16)
    rows = [both.view((f, k), (k, 1), start * k) for start in (0, f + apart)]
    x, scale, down = (on_gpu(rng.normal(size=s), bfloat16) for s in ((2, 5, k), (k,), (k, f)))
    biases = [on_gpu(rng.normal(size=f), bfloat16) for _ in range(2)] if bias else []
    y, _, gate_up, *kept = norm_mlp(x, scale, down, None, *rows, *biases, eps=1e-6, keep=keep)
    assert len(calls) == (not bias and not apart)
    n = wide(x) / np.sqrt((wide(x) ** 2).mean(-1, keepdims=True) + 1e-6) * wide(scale)
    if kept:
        np.testing.assert_allclose(wide(kept[0]), n, rtol=2.0**-8)
        n = wide(kept[0])
        np.testing.assert_allclose(wide(kept[1]), expected(wide(gate_up)), rtol=1.01 * 2.0**-8, atol=1e-6)
    want = np.concatenate([n @ wide(w).T for w in rows], -1)
    want += np.concatenate([wide(b) for b in biases]) if bias else 0
    np.testing.assert_allclose(wide(gate_up), want, rtol=2.0**-7, atol=0.05)
    want = wide(x) + expected(wide(gate_up)) @ wide(down).T
    np.testing.assert_allclose(
        wide(y), want, rtol=2.0**-7, atol=2.0**-8 * np.abs(expected(wide(gate_up))).sum(-1).max()
    )
